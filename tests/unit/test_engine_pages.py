"""Pages and rows of embeddings are held once, given back once, and counted."""

from __future__ import annotations

import random

import numpy as np
import pytest

from owrl_jax.engine.pages import PagePool
from owrl_jax.engine.settings import EngineSettings
from owrl_jax.engine.vision_cache import VisionCache


def test_a_page_has_one_holder():
    pool = PagePool(3)
    taken = [pool.take() for _ in range(3)]
    assert sorted(taken) == [0, 1, 2] and pool.free == 0
    with pytest.raises(IndexError):
        pool.take()
    pool.give(taken[:2])
    with pytest.raises(ValueError, match="not held"):
        pool.give([taken[0]])
    with pytest.raises(ValueError, match="not held"):
        pool.give([7])
    pool.check([taken[2]])
    with pytest.raises(AssertionError, match="leak"):
        pool.check([])
    with pytest.raises(AssertionError, match="two holders"):
        pool.check([taken[2], taken[2]])


def test_pictures_share_rows_while_they_are_known():
    cache = VisionCache(10)
    a = cache.use(b"a", 4)
    assert a is not None and len(a.rows) == 4 and not a.ready
    a.ready = True
    assert cache.use(b"a", 4) is a and (cache.hits, cache.misses) == (1, 1)
    b = cache.use(b"b", 6)
    assert b is not None and set(a.rows) | set(b.rows) == set(range(10))
    b.ready = True
    assert cache.use(b"c", 1) is None  # both are in use
    cache.release(b)
    assert b"b" in cache
    c = cache.use(b"c", 5)  # takes the place of b, which nobody uses
    assert c is not None and b"b" not in cache
    cache.check([a, a, c])


def test_a_new_version_finds_no_old_picture_and_an_unwritten_one_is_not_kept():
    cache = VisionCache(8)
    a, b = cache.use(b"a", 4), cache.use(b"b", 4)
    assert a is not None and b is not None
    a.ready = True
    cache.release(b)  # never written: forgotten at once
    assert b"b" not in cache and cache.free == 4
    cache.clear()
    again = cache.use(b"a", 4)
    assert again is not None and again is not a and not set(again.rows) & set(a.rows)
    cache.check([a, again])
    cache.release(a)
    assert cache.free == 4
    with pytest.raises(ValueError, match="more often"):
        cache.release(a)


def test_random_use_of_pictures_loses_no_row():
    rng = random.Random(1)
    cache, held = VisionCache(40), []
    sizes = {name: rng.randint(1, 15) for name in map(bytes, np.arange(1, 13, dtype=np.uint8)[:, None])}
    refused = 0
    for _ in range(4000):
        event = rng.random()
        if event < 0.55:
            name = rng.choice(list(sizes))
            entry = cache.use(name, sizes[name])
            refused += entry is None
            if entry is not None:
                assert len(entry.rows) == sizes[name]
                entry.ready |= rng.random() < 0.8
                held.append(entry)
        elif event < 0.99 and held:
            cache.release(held.pop(rng.randrange(len(held))))
        elif event >= 0.99:
            cache.clear()
        cache.check(held)
    assert refused  # the pool was small enough to matter


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_context": 100}, "multiple of page_tokens"),
        ({"decode_rows": (8, 4)}, "increasing"),
        ({"pages": 3}, "do not hold"),
        ({"weights": "both"}, "not one of"),
        ({"decode_steps": 0}, "at least 1"),
        ({"chunk_tokens": ()}, "increasing"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        EngineSettings(**wrong)
