"""Block tables: which page of a pool holds which positions of each batch entry (K8). Plain Python, no arrays."""

from __future__ import annotations

from typing import NamedTuple

from .errors import CapacityError


class Pool:
    """Who holds which page: how many tables name it, and the pages that none does."""

    def __init__(self, pages: int) -> None:
        self.shares = [0] * pages
        self.free = [*reversed(range(pages))]  # handed out from the end, so in ascending order

    def take(self) -> int:
        """A free page, now held once."""
        page = self.free.pop()
        self.shares[page] = 1
        return page

    def hold(self, page: int) -> None:
        """One more table names the page."""
        if self.shares[page] == 0:
            self.free.remove(page)
        self.shares[page] += 1

    def drop(self, page: int) -> None:
        """One table fewer names the page."""
        self.shares[page] -= 1
        if self.shares[page] == 0:
            self.free.append(page)


class Write(NamedTuple):
    """New positions first ... first + stop - start - 1 of an entry, for slots start ... stop - 1 of a page."""

    page: int
    start: int
    stop: int
    entry: int
    first: int


class Change(NamedTuple):
    """What an append has done to the tables, and what is to be done to the buffers."""

    copies: list[tuple[int, int]]  # (page, the shared page whose content it takes over)
    writes: list[Write]
    before: list[tuple[int, int, int | None]]  # (entry, index in its table, the page before, None for none)


class Tables:
    """One table of pages per batch entry; position p of an entry is in slot p % size of page table[p // size].

    The pages return to the pool when the tables are collected.
    """

    def __init__(self, pool: Pool, rows: list[list[int]], size: int) -> None:
        self.pool, self.rows, self.size = pool, rows, size
        for row in rows:
            for page in row:
                pool.hold(page)

    def __del__(self) -> None:
        for row in self.rows:
            for page in row:
                self.pool.drop(page)

    def shared(self, lengths: list[int]) -> Tables:
        """Tables of their own that name the same pages, as far as they are used."""
        rows = [row[: self.pages_of(length)] for row, length in zip(self.rows, lengths, strict=True)]
        return Tables(self.pool, rows, self.size)

    def pages_of(self, length: int) -> int:
        """How many pages that many positions take."""
        return -(-length // self.size)

    def extend(self, starts: list[int], stops: list[int], counted: bool = True) -> Change:
        """Makes room for positions starts[b] ... stops[b] - 1 of each entry b, in pages that nobody else names.

        Raises CapacityError (K6) if too few pages are free; nothing has changed then.
        """
        needed = self.needed(starts, stops)
        if needed > len(self.pool.free):
            expected = f"positions for at most {len(self.pool.free)} more pages, as many as are free"
            raise CapacityError("k, v", expected, f"positions for {needed} more")
        change = Change([], [], [])
        for entry, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            for index in self._touched(start, stop):
                page = self._own(entry, index, change)
                if counted:
                    low = max(start, index * self.size)
                    high = min(stop, (index + 1) * self.size)
                    begin = index * self.size
                    change.writes.append(Write(page, low - begin, high - begin, entry, low - start))
        return change

    def undo(self, change: Change) -> None:
        """Takes a change back, the newest first."""
        for entry, index, page in reversed(change.before):
            row = self.rows[entry]
            self.pool.drop(row[index])
            if page is None:
                row.pop()
            else:
                self.pool.hold(page)
                row[index] = page

    def _touched(self, start: int, stop: int) -> range:
        return range(start // self.size, self.pages_of(stop)) if stop > start else range(0)

    def needed(self, starts: list[int], stops: list[int]) -> int:
        """How many free pages `extend` would take."""
        needed = 0
        left: dict[int, int] = {}  # how many tables will name a page
        for row, start, stop in zip(self.rows, starts, stops, strict=True):
            for index in self._touched(start, stop):
                if index >= len(row):
                    needed += 1
                elif left.setdefault(row[index], self.pool.shares[row[index]]) > 1:
                    needed += 1
                    left[row[index]] -= 1
        return needed

    def _own(self, entry: int, index: int, change: Change) -> int:
        """The page of that index, new if there was none or others name it too."""
        row, pool = self.rows[entry], self.pool
        if index == len(row):
            row.append(pool.take())
            change.before.append((entry, index, None))
        elif pool.shares[row[index]] > 1:
            page = row[index]
            row[index] = pool.take()
            pool.drop(page)
            change.copies.append((row[index], page))
            change.before.append((entry, index, page))
        return row[index]
