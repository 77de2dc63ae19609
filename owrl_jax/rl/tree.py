"""The prefix tree of contexts: which tokens several turns have in common, found once, for any set of turns.

A turn's context is a path: its trunk, its leaf, and its response without the last id (which predicts nothing). Paths
are laid into a tree with path compression and share a node wherever their ids and pictures agree from the first token
on. Nothing here knows of systems, tasks, siblings or retries; they share because their ids do.

An image placeholder is compared by the picture it stands for, so that two different screenshots never share a node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from owrl_jax.rl.batch import TrainSample
from owrl_jax.types import Turn

Picture = tuple[str, tuple[int, int], int]
"""Content hash, grid in patches, and a number that keeps pictures apart which must not share their visual rows."""


class Node:
    """A run of tokens that no path leaves halfway.

    Attributes:
      keys: int64; ids of text tokens, -1-p at the placeholders of picture p of the tree.
      parent: None for the root, which has no tokens.
      children: by their first key.
      trunk: whether any turn's trunk runs through here.
    """

    __slots__ = ("children", "keys", "parent", "trunk")

    def __init__(self, keys: np.ndarray, parent: Node | None, trunk: bool = False) -> None:
        self.keys, self.parent, self.trunk = keys, parent, trunk
        self.children: dict[int, Node] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def path(self) -> list[Node]:
        """The nodes from below the root to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Path:
    """One turn in the tree.

    Attributes:
      sample, turn: which.
      end: node at whose end the response without its last id ends.
      responses: how many ids the response has; they are predicted at the last so many tokens of the path.
    """

    sample: int
    turn: int
    end: Node
    responses: int


class Forest:
    """The tree of a set of samples.

    Args:
      image_token: id of the placeholder; None for a text-only model, which has none.
      merge: patches per side of a visual token.
      shared: whether paths may share nodes and pictures; without, every turn stands alone.

    Attributes:
      root: its children are the first nodes.
      paths: of every turn that has a loss, in the order of the samples.
      pictures: that nodes refer to.
    """

    def __init__(self, *, image_token: int | None, merge: int, shared: bool) -> None:
        self._image_token, self._merge, self._shared = image_token, merge, shared
        self._numbers: dict[Picture, int] = {}
        self.root = Node(np.zeros(0, np.int64), None)
        self.paths: list[Path] = []
        self.pictures: list[Picture] = []

    def add(self, number: int, sample: TrainSample) -> None:
        """Lays the turns of a sample into the tree.

        Raises:
          ValueError: if placeholders and pictures of a turn disagree, naming both.
        """
        trunk, whole = self.root, np.zeros(0, np.int64)
        for turn_number, turn in enumerate(sample.turns):
            where = f"sample {sample.name}, turn {turn_number}"
            extension = self._keys(turn.trunk_ids, (), where + ", trunk", 0)
            live = sample.weight(turn_number) > 0
            serial = 0 if self._shared else 1 + len(self.paths)
            if self._shared:
                trunk = self._descend(trunk, extension, trunk=True)
                at = trunk
            else:
                whole = np.concatenate([whole, extension])
                at = self._alone(whole, trunk=True) if live else self.root
            if not live:
                continue
            leaf = self._keys(turn.leaf_ids, _pictures(turn), where + ", leaf", serial)
            response = self._keys(turn.response_ids, (), where + ", response", 0)
            if len(at) + len(leaf) == 0:
                raise ValueError(f"{where} has an empty prompt: nothing predicts its first response id")
            at = self._descend(at, np.concatenate([leaf, response[:-1]]), trunk=False)
            self.paths.append(Path(sample=number, turn=turn_number, end=at, responses=len(response)))

    def ids(self, node: Node) -> np.ndarray:
        """Token ids of a node, placeholders included."""
        return np.where(node.keys < 0, -1 if self._image_token is None else self._image_token, node.keys)

    def images(self, node: Node) -> list[int]:
        """Numbers of the pictures whose placeholders stand in a node, in order."""
        found, at = [], 0
        visual = node.keys[node.keys < 0]
        while at < len(visual):
            number = int(-1 - visual[at])
            found.append(number)
            at += self.visual_tokens(number)
        return found

    def visual_tokens(self, number: int) -> int:
        """Tokens of a picture."""
        _, (h, w), _ = self.pictures[number]
        return h * w // self._merge**2

    def patches(self, number: int) -> int:
        """Patches of a picture."""
        _, (h, w), _ = self.pictures[number]
        return h * w

    def _keys(
        self, ids: Sequence[int], pictures: Sequence[tuple[str, tuple[int, int]]], where: str, serial: int
    ) -> np.ndarray:
        keys = np.asarray(ids, np.int64).reshape(-1)
        if self._image_token is None:
            if pictures:
                raise ValueError(f"{where}: the model is text-only, but the turn has {len(pictures)} pictures")
            return keys
        places = np.flatnonzero(keys == self._image_token)
        numbers = [self._number((sha, grid, serial)) for sha, grid in pictures]
        wanted = np.repeat(np.asarray(numbers, np.int64), [self.visual_tokens(n) for n in numbers])
        if len(places) != len(wanted):
            raise ValueError(
                f"{where}: {len(places)} image placeholders, but its {len(pictures)} pictures (grids "
                f"{[grid for _, grid in pictures]}) take {len(wanted)}; the turn cannot be trained on"
            )
        keys[places] = -1 - wanted
        return keys

    def _number(self, picture: Picture) -> int:
        if picture not in self._numbers:
            self._numbers[picture] = len(self.pictures)
            self.pictures.append(picture)
        return self._numbers[picture]

    def _alone(self, keys: np.ndarray, *, trunk: bool) -> Node:
        """A path of its own from the root. The root finds it under a key that no token has."""
        node = Node(keys, self.root, trunk)
        self.root.children[-1 - (1 << 40) - len(self.root.children)] = node
        return node

    def _descend(self, node: Node, keys: np.ndarray, *, trunk: bool) -> Node:
        """The node at whose end these keys end when they follow `node`; makes and splits nodes as needed.

        A node that is split keeps its end: whoever holds a node as the end of a path still does.
        """
        while len(keys):
            child = node.children.get(int(keys[0]))
            if child is None:
                child = Node(keys, node, trunk)
                node.children[int(keys[0])] = child
                return child
            common = _common(child.keys, keys)
            if common < len(child):
                head = Node(child.keys[:common], node, child.trunk)
                node.children[int(keys[0])] = head
                child.keys, child.parent = child.keys[common:], head
                head.children[int(child.keys[0])] = child
                child = head
            child.trunk |= trunk
            node, keys = child, keys[common:]
        return node


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def _pictures(turn: Turn) -> tuple[tuple[str, tuple[int, int]], ...]:
    newest = () if turn.screenshot is None or turn.grid is None else ((turn.screenshot, turn.grid),)
    return (*turn.older_pictures, *newest)


def walk(root: Node, kept: Iterable[Node]) -> Iterator[tuple[Node, bool]]:
    """Depth-first walk over the nodes of `kept`: each on entering (True) and on leaving (False).

    Children that carry a trunk come first and leaves after them: so the trunk tokens of a trajectory stand together,
    and so do its leaves, and whole blocks of keys that nobody sees can be skipped.
    """
    inside = set(map(id, kept))
    stack: list[tuple[Node, bool]] = [(child, True) for child in _ordered(root, inside)]
    while stack:
        node, entering = stack.pop()
        yield node, entering
        if entering:
            stack.append((node, False))
            stack += [(child, True) for child in _ordered(node, inside)]


def _ordered(node: Node, inside: set[int]) -> list[Node]:
    """Children to be visited, last first (they go on a stack)."""
    children = [child for child in node.children.values() if id(child) in inside]
    return sorted(children, key=lambda child: not child.trunk)[::-1]
