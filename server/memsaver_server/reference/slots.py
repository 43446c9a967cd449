"""Slots of the cache: which are free, and which prefixes they hold."""

from __future__ import annotations

from collections.abc import Sequence


class SlotTable:
    """Assigns slots and caches prefixes: a new prompt gets the slot that holds most of its beginning.

    Only whole chunks are cached: a chunk is always computed in the same shape at the same position, so that a reused
    one is bitwise what computing it again would give.
    """

    def __init__(self, slots: int, chunk: int) -> None:
        self._chunk = chunk
        self._held: list[tuple[int, ...]] = [()] * slots
        self._free: dict[int, None] = dict.fromkeys(range(slots))  # in the order of their return

    def __len__(self) -> int:
        return len(self._held)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, ids: Sequence[int]) -> tuple[int, int]:
        """Take a free slot for ``ids``; return it and how many of the ids it holds already.

        At least one chunk is left to compute, which gives the last token's logits.
        """
        limit = (len(ids) - 1) // self._chunk * self._chunk
        best, reused = -1, 0
        for slot in self._free:
            common = self._common(slot, ids, limit)
            if common > reused:
                best, reused = slot, common
        if best < 0:  # one that holds nothing, else the least recently used
            best = next((slot for slot in self._free if not self._held[slot]), next(iter(self._free)))
        del self._free[best]
        self._held[best] = self._held[best][:reused]
        return best, reused

    def remember(self, slot: int, ids: Sequence[int]) -> None:
        """Record that ``slot`` holds the keys and values of ``ids``."""
        self._held[slot] = tuple(ids[: len(ids) // self._chunk * self._chunk])

    def give_back(self, slot: int) -> None:
        self._free[slot] = None

    def forget(self) -> None:
        """Forget what every slot holds."""
        self._held = [()] * len(self._held)

    def _common(self, slot: int, ids: Sequence[int], limit: int) -> int:
        held = self._held[slot]
        common = 0
        while common < min(limit, len(held)) and (
            held[common : common + self._chunk] == tuple(ids[common : common + self._chunk])
        ):
            common += self._chunk
        return common
