"""Numbers of free pages. Whoever holds a page number holds the page; there is one holder at a time.

Sharing is not here: a page that several sessions read belongs to the prefix tree (`radix.py`), which counts its users.
So a page is free, or a session's own, or the tree's, and `check` can say so.
"""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Pages 0 … total-1."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a pool needs at least one page, got {total}")
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * total)

    @property
    def free(self) -> int:
        """How many are free."""
        return len(self._free)

    @property
    def used(self) -> int:
        """How many are held."""
        return self.total - len(self._free)

    def take(self) -> int:
        """A free page.

        Raises:
          IndexError: if there is none.
        """
        page = self._free.pop()
        self._is_free[page] = 0
        return page

    def give(self, pages: Iterable[int]) -> None:
        """Frees pages.

        Raises:
          ValueError: if one is free already or does not exist: two holders believed to own it.
        """
        for page in pages:
            if not 0 <= page < self.total or self._is_free[page]:
                raise ValueError(f"page {page} is not held by anyone, so it cannot be given back")
            self._is_free[page] = 1
            self._free.append(page)

    def check(self, held: Iterable[int]) -> None:
        """Raises AssertionError unless exactly `held` are held, each by one holder."""
        held = list(held)
        assert len(set(held)) == len(held), "a page has two holders"
        assert len(held) == self.used, f"{self.used} pages are taken but {len(held)} are accounted for: a leak"
        assert not any(self._is_free[page] for page in held), "a held page is in the free list"
