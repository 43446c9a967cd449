"""Failures that random programs plan: of driver calls and, if the build of the core supports it, of system calls."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from memsaver_core import _native, process

#: The call; the driver's kind of error, or an errno; at which call from now, and how often in a row.
Fault = tuple[str, "str | int", int, int]
SHORT = -1  # a transfer that ends early

#: The driver and system calls that may fail, and how.
UNDO = {"unmap": ("invalid_value",), "release": ("invalid_value",), "synchronize": ("invalid_value",)}
ALLOCATING = {
    "create": ("invalid_value", "out_of_memory"),
    "map": ("invalid_value",),
    "allow_access": ("invalid_value",),
    "reserve": ("invalid_value",),
    **UNDO,
}
MEMORY = {
    "register_host": ("invalid_value", "out_of_host_memory"),
    "mmap": (errno.ENOMEM,),
    "fopen": (errno.EMFILE,),
    "thread": (errno.EAGAIN,),
}
MOVING = {
    **dict.fromkeys(("digest", "record", "wait", "done", "memory_info"), ("invalid_value",)),
    **MEMORY,
}
RELEASING = {
    **dict.fromkeys(("copy_to_host", "sample", "pack"), ("invalid_value",)),
    # Memory to pack in.
    **dict.fromkeys(("create", "map", "allow_access", "reserve"), ("invalid_value",)),
    "open": (errno.EMFILE, errno.EOPNOTSUPP),
    "mkostemp": (errno.EMFILE,),
    "fstatvfs": (errno.EIO,),
    "fallocate": (errno.EOPNOTSUPP, errno.EIO),
    "pwrite": (errno.ENOSPC, errno.EIO, errno.EINTR, SHORT),
    **MOVING,
    **UNDO,
}
RELEASING_IN_PART = {
    **dict.fromkeys(("unmap", "release", "copy_to_host", "digest", "pack"), ("invalid_value",)),
    **dict.fromkeys(("record", "wait", "done"), ("invalid_value",)),
    "create": ("invalid_value",),  # so that the undo fails, too
    "register_host": ("invalid_value",),
    "pwrite": (errno.ENOSPC,),
}
RESUMING = {
    **dict.fromkeys(("copy_to_device", "fill_zero", "stream_wait", "unpack"), ("invalid_value",)),
    "pread": (errno.EIO, errno.EINTR, SHORT),
    **ALLOCATING,
    **MOVING,
}
RESERVING = {
    "create": ("invalid_value", "out_of_memory"),
    **dict.fromkeys(("release", "memory_info"), ("invalid_value",)),
}
RESIZING = {
    **dict.fromkeys(("create", "map", "allow_access"), ("invalid_value",)),
    **dict.fromkeys(("fill_zero", "record", "wait"), ("invalid_value",)),
    **UNDO,
}
DROPPING = {"unregister_host": ("invalid_value",), "thread": (errno.EAGAIN,), "fallocate": (errno.EIO,)}


def faults_of(calls: Mapping[str, Sequence[str | int]]) -> st.SearchStrategy[list[Fault]]:
    """One or two failures."""
    one = st.tuples(
        st.sampled_from([(call, how) for call, hows in calls.items() for how in hows]),
        st.integers(1, 3) | st.integers(1, 12),
        st.sampled_from((1, 1, 1, 3)),
    ).map(lambda fault: (*fault[0], *fault[1:]))
    return st.lists(one, min_size=1, max_size=2)


class Faults:
    """The planned failures of one step: of driver calls and, if the build supports it, of system calls."""

    def __init__(self) -> None:
        self.saver = process.saver()
        self.system = ctypes.CDLL(_native.__file__)
        self.fails_system_calls = hasattr(self.system, "memsaver_fail_system_call")
        if self.fails_system_calls:
            self.system.memsaver_system_call_failed.restype = ctypes.c_bool
            self.system.memsaver_heal_system_calls.restype = ctypes.c_bool
        self._at: list[tuple[str, int]] = []
        self._met = False

    def plan(self, faults: Sequence[Fault]) -> None:
        for call, how, nth, times in faults:
            if isinstance(how, str):
                self._at.append((call, self.saver.counts().get(call, 0) + nth))
                self.saver.fail(call, nth, how, times)
            elif self.fails_system_calls:
                counted = (ctypes.c_size_t(nth), ctypes.c_int(how), ctypes.c_size_t(times))
                self.system.memsaver_fail_system_call(call.encode(), *counted)

    def met(self) -> bool:
        """Whether one of them happened."""
        counts = self.saver.counts()
        self._met = self._met or any(counts.get(call, 0) >= at for call, at in self._at)
        if self.fails_system_calls:
            self._met = self._met or self.system.memsaver_system_call_failed()
        return self._met

    def heal(self) -> None:
        """Cancel failures that did not happen; held calls continue."""
        if self.fails_system_calls:
            self._met = self.system.memsaver_heal_system_calls() or self._met
        self.saver.heal()
        self.met()
        self._at.clear()

    def end(self) -> None:
        self.heal()
        self._met = False
