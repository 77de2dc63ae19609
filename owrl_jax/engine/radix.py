"""The prefix cache: a radix tree whose digits are whole pages of tokens.

A node is one full KV page; the path from the root spells the tokens that the page and everything before it hold. A
prompt's cached prefix is the longest path that spells it. Keys are 64-bit numbers: the id of a token, or, inside the
placeholder run of an image, numbers drawn from the image's content hash (`content_keys`). So two prompts share an image
if and only if their bytes are the same, and a run of n tokens is as hard to forge as 63·n bits of the hash.

`users` counts sessions whose path ends at a node; a node with users or children is never evicted. Leaves without either
wait in order of their last use and give their pages back, the oldest first. `clear` is what a new policy version does:
nothing of the old tree is found again, and pages still in use are freed when their sessions let go.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np


class Node:
    """One page of one prefix."""

    __slots__ = ("children", "dead", "key", "page", "parent", "users")

    def __init__(self, key: bytes, page: int, parent: Node | None) -> None:
        self.key, self.page, self.parent = key, page, parent
        self.children: dict[bytes, Node] = {}
        self.users = 0
        self.dead = False


def content_keys(ids: Sequence[int], images: Sequence[tuple[int, int, bytes]]) -> np.ndarray:
    """int64 keys of a prompt.

    Args:
      ids: its token ids.
      images: (start, length, content hash) of each image's run of placeholders.
    """
    keys = np.asarray(ids, np.int64).copy()
    for start, length, digest in images:
        drawn = np.frombuffer(hashlib.shake_256(digest).digest(8 * length), np.int64)
        keys[start : start + length] = drawn | np.int64(-(2**63))  # negative: never the id of a token
    return keys


class PrefixTree:
    """Pages by what they hold.

    The tree owns the pages of its nodes. A session pins the deepest node of its path and lets go with `unpin`.
    """

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.root = Node(b"", -1, None)
        self._idle: OrderedDict[Node, None] = OrderedDict()  # live leaves without users, oldest use first
        self._orphans: set[Node] = set()  # dead nodes that some session still reads
        self.nodes = 0

    @property
    def evictable(self) -> int:
        """Pages that could be had now, one after another: those of subtrees that nobody uses."""
        return self.nodes - self._pinned()

    def _pinned(self) -> int:
        seen: set[Node] = set()
        for node in self._walk():
            if node.users:
                at: Node | None = node
                while at is not None and at is not self.root and at not in seen:
                    seen.add(at)
                    at = at.parent
        return len(seen)

    def child(self, node: Node, key: bytes) -> Node | None:
        """The page that follows `node` with these tokens, if it is cached."""
        return node.children.get(key)

    def match(self, keys: np.ndarray, limit: int) -> list[Node]:
        """Nodes of the longest cached prefix of `keys`, of at most `limit` tokens."""
        size, node, found = self.page_tokens, self.root, []
        for start in range(0, min(limit, len(keys)) - size + 1, size):
            node = node.children.get(keys[start : start + size].tobytes())
            if node is None:
                break
            found.append(node)
        return found

    def extend(self, parent: Node, key: bytes, page: int) -> tuple[Node, bool]:
        """The node below `parent` with this key, and whether it is new and has taken over `page`.

        A parent that has died takes no children: the page stays the caller's, and the node returned is the parent.
        """
        if parent.dead:
            return parent, False
        known = parent.children.get(key)
        if known is not None:
            return known, False
        node = Node(key, page, parent)
        parent.children[key] = node
        self._idle.pop(parent, None)
        self._idle[node] = None
        self.nodes += 1
        return node, True

    def pin(self, node: Node) -> None:
        """Counts a session whose path ends here."""
        if node is self.root:
            return
        node.users += 1
        self._idle.pop(node, None)

    def unpin(self, node: Node) -> list[int]:
        """The opposite. Returns pages that are free now, because the tree they were in has died.

        Raises:
          ValueError: if nobody uses the node.
        """
        if node is self.root:
            return []
        if node.users < 1:
            raise ValueError("a node was let go more often than it was taken")
        node.users -= 1
        if node.users:
            return []
        if node.dead:
            return self._bury(node)
        if not node.children:
            self._idle[node] = None
        return []

    def evict(self) -> int | None:
        """Frees the page of the leaf that was not used for the longest time; None if every leaf is in use."""
        if not self._idle:
            return None
        node, _ = self._idle.popitem(last=False)
        return self._drop(node)

    def discard(self, node: Node) -> int | None:
        """Frees the page of a leaf that nobody uses, whatever its age; None if it is in use."""
        if node not in self._idle:
            return None
        del self._idle[node]
        return self._drop(node)

    def _drop(self, node: Node) -> int:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        node.dead = True
        self.nodes -= 1
        if parent is not self.root and not parent.children and not parent.users:
            self._idle[parent] = None
        return node.page

    def clear(self) -> list[int]:
        """Forgets everything. Returns the pages that are free now; others follow from `unpin`."""
        freed = []
        for node in list(self._walk()):
            node.dead = True
            self._orphans.add(node)
        self.root.children = {}
        self._idle.clear()
        self.nodes = 0
        for node in list(self._orphans):
            if node in self._orphans and not node.users and not node.children:
                freed += self._bury(node)
        return freed

    def _bury(self, node: Node) -> list[int]:
        """Frees a dead node that nobody uses and that has no children, and then its ancestors in the same state."""
        freed = []
        at: Node | None = node
        while at is not None and at in self._orphans and not at.users and not at.children:
            self._orphans.discard(at)
            freed.append(at.page)
            parent = at.parent
            if parent is not None and parent.children.get(at.key) is at:  # the root has new children by now
                del parent.children[at.key]
            at = parent
        return freed

    def _walk(self) -> Iterator[Node]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node

    def pages(self) -> list[int]:
        """All pages the tree owns, of dead nodes too."""
        return [node.page for node in self._walk()] + [node.page for node in self._orphans]

    def check(self) -> None:
        """Raises AssertionError unless counts and lists tell one story."""
        live = list(self._walk())
        assert len(live) == self.nodes, f"{len(live)} nodes are reachable, {self.nodes} are counted"
        idle = {node for node in live if not node.users and not node.children}
        assert idle == set(self._idle), "the list of evictable leaves is not the set of evictable leaves"
        assert all(node.users >= 0 and not node.dead for node in live)
        assert all(node.dead and (node.users or node.children) for node in self._orphans), "a dead page leaks"
