"""The prefix tree against a plain model of it, and what content keys promise."""

from __future__ import annotations

import random

import numpy as np
import pytest

from owrl_jax.engine.radix import PrefixTree, content_keys

SIZE = 2


def keys(*ids: int) -> np.ndarray:
    return np.asarray(ids, np.int64)


def insert(tree: PrefixTree, ids: np.ndarray, first_page: int):
    node, page = tree.root, first_page
    for start in range(0, len(ids) - SIZE + 1, SIZE):
        node, new = tree.extend(node, ids[start : start + SIZE].tobytes(), page)
        page += new
    return node


def test_the_longest_cached_prefix_is_found_and_no_more():
    tree = PrefixTree(SIZE)
    insert(tree, keys(1, 2, 3, 4, 5, 6), 10)
    insert(tree, keys(1, 2, 3, 4, 9, 9), 20)
    assert [n.page for n in tree.match(keys(1, 2, 3, 4, 9, 9, 7, 7), 8)] == [10, 11, 20]
    assert [n.page for n in tree.match(keys(1, 2, 3, 4, 5, 6), 5)] == [10, 11]  # the limit cuts whole pages
    assert tree.match(keys(2, 1, 3, 4), 4) == []
    tree.check()


def test_leaves_go_oldest_use_first_and_never_while_in_use():
    tree = PrefixTree(SIZE)
    old = insert(tree, keys(1, 1, 2, 2), 0)
    new = insert(tree, keys(3, 3), 5)
    tree.pin(old)
    assert tree.evict() == 5  # the only leaf that nobody uses
    assert tree.evict() is None  # pages 0 and 1 are an ancestor and a leaf of a session
    assert tree.unpin(old) == []
    assert (tree.evict(), tree.evict(), tree.evict()) == (1, 0, None)
    assert new.dead and tree.nodes == 0
    with pytest.raises(ValueError, match="more often than it was taken"):
        tree.unpin(old)


def test_using_a_leaf_makes_it_young():
    tree = PrefixTree(SIZE)
    first, second = insert(tree, keys(1, 1), 0), insert(tree, keys(2, 2), 1)
    tree.pin(first)
    tree.unpin(first)
    assert tree.evict() == second.page


def test_a_new_version_forgets_everything_and_frees_what_is_in_use_later():
    tree = PrefixTree(SIZE)
    used = insert(tree, keys(1, 1, 2, 2), 0)  # pages 0, 1
    insert(tree, keys(1, 1, 3, 3), 7)
    tree.pin(used)
    assert tree.clear() == [7]
    assert tree.match(keys(1, 1, 2, 2), 4) == []
    assert tree.extend(used, keys(4, 4).tobytes(), 9) == (used, False)  # the dead take no children
    again = insert(tree, keys(1, 1), 8)
    tree.check()
    assert sorted(tree.unpin(used)) == [0, 1]
    assert tree.match(keys(1, 1), 2) == [again]
    assert tree.pages() == [8]


def test_random_histories_agree_with_a_set_of_prefixes():
    """The tree holds exactly the prefixes that were put in and not evicted, whatever the order of events."""
    rng = random.Random(0)
    tree, known, pinned, page = PrefixTree(SIZE), {}, [], 0
    for _ in range(3000):
        event = rng.random()
        ids = keys(*(rng.randint(0, 2) for _ in range(SIZE * rng.randint(1, 4))))
        if event < 0.45:
            node = tree.root
            for end in range(SIZE, len(ids) + 1, SIZE):
                node, new = tree.extend(node, ids[end - SIZE : end].tobytes(), page)
                spelled = tuple(ids[:end])
                assert new == (spelled not in known)
                known.setdefault(spelled, page)
                assert node.page == known[spelled]
                page += new
        elif event < 0.6:
            found = tree.match(ids, len(ids))
            if found:
                tree.pin(found[-1])
                pinned.append((found[-1], tuple(ids[: SIZE * len(found)])))
        elif event < 0.75 and pinned:
            assert tree.unpin(pinned.pop(rng.randrange(len(pinned)))[0]) == []
        elif event < 0.9:
            gone = tree.evict()
            leaves = {p for p in known if not any(q[:-SIZE] == p for q in known)}
            free = leaves - {p for _, p in pinned}
            assert (gone is None) == (not free)
            if gone is not None:
                (spelled,) = [p for p in free if known[p] == gone]
                del known[spelled]
        else:
            want = 0
            while want + SIZE <= len(ids) and tuple(ids[: want + SIZE]) in known:
                want += SIZE
            assert [n.page for n in tree.match(ids, len(ids))] == [
                known[tuple(ids[:end])] for end in range(SIZE, want + 1, SIZE)
            ]
        tree.check()
    assert tree.evictable == tree.nodes - len({q[:n] for _, q in pinned for n in range(SIZE, len(q) + 1, SIZE)})


def test_content_keys_tell_pictures_apart_by_their_bytes_alone():
    ids = [5, 100, 100, 100, 6]
    same, other = content_keys(ids, [(1, 3, b"a" * 32)]), content_keys(ids, [(1, 3, b"b" * 32)])
    assert list(same[[0, 4]]) == [5, 6]
    assert (same[1:4] < 0).all() and len(set(same[1:4])) == 3  # never the id of a token, never two alike
    assert (same == content_keys(ids, [(1, 3, b"a" * 32)])).all()
    assert not (same[1:4] == other[1:4]).any()
    # The run of a longer picture of the same bytes begins alike: its first pages may be shared.
    assert (content_keys([100] * 6, [(0, 6, b"a" * 32)])[:3] == same[1:4]).all()
