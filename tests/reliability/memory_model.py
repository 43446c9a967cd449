"""The model of random programs: what they allocated, and what must be in it, page by page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

PAGE = 4096

#: A tag, a policy, a device.
Kind = tuple[str, str, int]


@dataclass(eq=False)
class Memory:
    """One tensor and its expected content, page by page."""

    tensor: torch.Tensor
    address: int
    tag: str
    policy: str
    device: int
    expected: np.ndarray  # the expected content of each page,
    sure: np.ndarray  # pages with expected content
    or_zeros: np.ndarray = field(init=False)  # zeros are allowed instead: a failed release may have owed them
    here: np.ndarray = field(init=False)  # resident pages
    shrunk: np.ndarray = field(init=False)  # pages that a resize gave back
    #: Released pages that a resume cannot restore, or perhaps cannot, because their backup was changed.
    damaged: np.ndarray = field(init=False)
    perhaps_damaged: np.ndarray = field(init=False)
    told: bool = False  # a resume reported it,
    perhaps_told: bool = False  # or may have noted it

    def __post_init__(self) -> None:
        self.here = np.ones(self.pages, bool)
        for name in ("or_zeros", "shrunk", "damaged", "perhaps_damaged"):
            setattr(self, name, np.zeros(self.pages, bool))

    @property
    def pages(self) -> int:
        return len(self.sure)

    @property
    def kind(self) -> Kind:
        return (self.tag, self.policy, self.device)

    @property
    def bytes(self) -> int:
        return self.pages * PAGE

    @property
    def released(self) -> np.ndarray:
        return ~(self.here | self.shrunk)

    @property
    def released_bytes(self) -> int:
        return int(np.count_nonzero(self.released)) * PAGE

    def content(self) -> np.ndarray:
        """Its pages. Touching those that are not resident crashes the process."""
        return pages_of(self.tensor.numpy())

    def owe(self, policy: str, pages: np.ndarray) -> None:
        """These pages were released under this policy."""
        if policy == "discard":
            self.sure[pages] = False
        elif policy == "zero":
            self.sure[pages] = True
            self.expected[pages] = 0
        if policy in ("discard", "zero"):
            self.or_zeros[pages] = False

    def may_owe(self, policy: str, pages: np.ndarray) -> None:
        """These pages were released, perhaps with this policy."""
        if policy == "discard":
            self.sure[pages] = False
        elif policy == "zero":
            self.or_zeros |= pages

    def give_up(self, policy: str) -> None:
        """Released pages are owed what this policy says, instead of content."""
        self.owe(policy, self.released)
        self.damaged[:] = self.perhaps_damaged[:] = False
        self.told = self.perhaps_told = False

    def may_give_up(self, policy: str) -> None:
        self.may_owe(policy, self.released)
        self.perhaps_damaged |= self.damaged
        self.damaged[:] = False
        self.told, self.perhaps_told = False, self.told or self.perhaps_told

    def tell(self, begin: int, nbytes: int) -> bool:
        """A resume reported that this range cannot be restored. Returns whether that may be true."""
        pages = self.address + np.arange(self.pages) * PAGE
        told = (pages >= begin) & (pages < begin + nbytes)
        self.told |= bool(told.any())
        return bool((told & (self.damaged | self.perhaps_damaged)).any())

    def be_resized(self, unused: np.ndarray, now: np.ndarray, *, done: bool) -> None:
        """A resize in which these pages were unused is over, and these pages are resident."""
        assert not (self.here & ~now & ~unused).any(), f"pages in use were given back: {self}"
        assert not done or (now | unused).all(), f"a resize did not bring back what is in use: {self}"
        self.owe("zero", self.here & ~now)
        if not done:
            self.or_zeros |= self.here & now & unused
        self.here, self.shrunk = now, ~now

    def be_divided(self, unused: np.ndarray, piece_bytes: int) -> None:
        """A resize in which these pages were unused is over; nothing is resident, and nothing moved."""
        pieces = np.arange(self.pages) * PAGE // piece_bytes
        gone = ~np.isin(pieces, pieces[~unused])
        self.owe("zero", gone)
        self.damaged[gone] = self.perhaps_damaged[gone] = False
        self.shrunk = gone

    def be_resident(self) -> None:
        self.here = ~self.shrunk
        self.damaged[:] = self.perhaps_damaged[:] = False
        self.told = self.perhaps_told = False

    def look(self) -> None:
        """Every resident page has its expected content; from now on exactly the present content is expected."""
        if not self.here.any():
            return
        at = np.flatnonzero(self.here)
        now = self.content()[at]  # a copy, so that a failure's traceback does not keep the memory alive
        right = ~self.sure[at] | (now == self.expected[at]).all(axis=1)
        right |= self.or_zeros[at] & (now == 0).all(axis=1)
        assert right.all(), f"wrong content in pages {at[~right].tolist()} of {self}"
        self.expected[at] = now
        self.sure[at] = True
        self.or_zeros[at] = False

    def __str__(self) -> str:
        return f"{self.pages} pages under {self.tag!r} ({self.policy}) on device {self.device} at {self.address:#x}"


def pages_of(content: np.ndarray) -> np.ndarray:
    return content.view(np.uint64).reshape(-1, PAGE // 8)


def mapped_pages(left: Sequence[tuple[int, int]]) -> Callable[[Memory], np.ndarray]:
    """Which pages of a memory the kernel has mapped now, without the ranges ``left`` mapped that count as released."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split(" ", 1)[0].split("-") for line in lines if "memsaver-device" in line and " rw" in line]
    begins = np.array([0, *(int(begin, 16) for begin, _ in mapped)], np.uint64)
    ends = np.array([0, *(int(end, 16) for _, end in mapped)], np.uint64)

    def of(memory: Memory) -> np.ndarray:
        pages = np.uint64(memory.address) + np.arange(memory.pages, dtype=np.uint64) * np.uint64(PAGE)
        result: np.ndarray = pages < ends[np.searchsorted(begins, pages, "right") - 1]
        for begin, nbytes in left:
            result &= (pages < begin) | (pages >= begin + nbytes)
        return result

    return of
