"""The state of the compatibility API in this process: the preload library, the environment variables, retention."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import memsaver_core as ms
from memsaver_core import _native, process
from memsaver_core.compat.torch_memory_saver.utils import set_variable
from memsaver_core.contract.errors import ConfigurationError, UnknownTagError
from memsaver_core.contract.policies import ZEROED_TAGS

logger = logging.getLogger("memsaver")

#: How long unused memory is kept, seconds: longer than a training step, so until the next pause.
KEPT_FOR_S = 600.0
#: How often it is checked that the host has plenty of memory, seconds.
_EVERY_S = 1.0
#: From this value on memory is scarce: the percentage of the last 10 s in which a task waited for it (``some avg10``).
_PRESSURE = 1.0
_PRESSURE_FILE = Path("/proc/pressure/memory")


class MisuseError(ConfigurationError, AssertionError):
    """A call that fails an assertion in torch_memory_saver; the message says what to do."""


def flag(name: str) -> bool:
    """Return whether a variable is 1, true or yes; unset is False. Raises ConfigurationError if it is no such word."""
    value = os.environ.get(name, "0")
    if value in ("0", "false", "FALSE", "no", "NO"):
        return False
    if value in ("1", "true", "TRUE", "yes", "YES"):
        return True
    raise ConfigurationError(f"{name}={value!r} cannot be used; set it to 1 or 0")


def check_backend(value: str, name: str = "a CPU backup backend") -> str:
    """Return ``value``, a kind of backup memory, empty for the default; raise ConfigurationError, with ``name``, if it
    is none."""
    if value not in ("", "pinned", "mmap"):
        raise ConfigurationError(f"{name} is 'pinned' or 'mmap', not {value!r}")
    return value


def is_plentiful(spare_bytes: int) -> bool:
    """Return whether the host, or this process's control group, can spare ``spare_bytes`` of pinned memory: no task
    waited for memory lately, and at least as much more is available."""
    fields: list[str] = []
    with suppress(OSError):  # a kernel without it
        fields = _PRESSURE_FILE.read_text().split()
    pressure = float(next((field[6:] for field in fields if field.startswith("avg10=")), "0"))
    return pressure < _PRESSURE and _native.available_memory_bytes() >= spare_bytes


class SpareMemory:
    """Host memory that stays pinned between a resume and the next pause, which is then faster. It is kept while the
    host has plenty of memory, at most for ``KEPT_FOR_S``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until = 0.0
        self._watching = False
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        atexit.register(self._end)

    def keep(self, saver: _native.Saver) -> None:
        """Keep what the saver has pinned; unpin it at once if no thread can be started to watch over it."""
        with self._lock:
            self._until = time.monotonic() + KEPT_FOR_S
            if self._watching:
                return
            thread = threading.Thread(target=self._watch, args=(saver,), name="memsaver-spare-memory", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                logger.warning("backup memory is unpinned at once: no thread to watch over it: %s", error)
            else:
                self._watching, self._thread = True, thread
                return
        saver.trim_backup_memory(at_once=True)

    def _end(self) -> None:
        """End the thread: if Python ended it as it returns from native code, C++ would abort the process."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, saver: _native.Saver) -> None:
        while self._keeps(saver):
            if self._ending.wait(_EVERY_S):
                return
        saver.trim_backup_memory()

    def _keeps(self, saver: _native.Saver) -> bool:
        try:
            plentiful = is_plentiful(saver.status()["host_backup"]["unused_bytes"])
        except Exception:
            logger.exception("backup memory is unpinned: how much memory the host has cannot be read")
            plentiful = False
        with self._lock:
            self._watching = plentiful and time.monotonic() <= self._until
            return self._watching


class State:
    """The state of the compatibility API; one in a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Any] = []  # the library calls them for as long as the process lives
        self._initialized = False
        self.retaining = False  # whether a resume leaves backups in host memory
        self.retained_tags: set[str] = set()  # those whose last resume did
        self._spare = SpareMemory()
        self.frees_at_once = False  # whether a resume returns only once the memory of its backups is unmapped

    def initialize(self) -> None:
        """Make the saver and apply the environment variables, once; raise ConfigurationError if one cannot be used."""
        with self._lock:
            if self._initialized:
                return
            for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
                if "expandable_segments:True" in os.environ.get(name, ""):
                    raise ConfigurationError(
                        f"{name}: expandable_segments is not supported, because torch maps such memory past every "
                        "hook; remove it"
                    )
            backend = os.environ.get("TMS_INIT_CPU_BACKUP_BACKEND", "")
            self.frees_at_once = check_backend(backend, "TMS_INIT_CPU_BACKUP_BACKEND") == "mmap"
            # All are read, so that an invalid value is refused now.
            _, cpu, disk = [flag(f"TMS_INIT_ENABLE{what}") for what in ("", "_CPU_BACKUP", "_DISK_BACKUP")]
            if cpu and disk:
                raise ConfigurationError(
                    "TMS_INIT_ENABLE_CPU_BACKUP and TMS_INIT_ENABLE_DISK_BACKUP exclude each other"
                )
            self.retaining = flag("TMS_RETAIN_CPU_BACKUP")
            if process.enabled():
                if folder := os.environ.get("TMS_DISK_BACKUP_DIR"):
                    set_disk_folder(folder)
                process.saver()
            self._initialized = True

    def prepare_pause(self) -> None:
        """Pin memory for the first backup of all regions, in the background, and keep it as after a resume."""
        saver = process.existing_saver()
        if saver is not None and process.core_settings().prepare_backup and not self.frees_at_once:
            saver.grow_backup_memory()
            self._spare.keep(saver)

    def pause(self, tag: str | None) -> None:
        """Release a tag, or all if it is None or empty. An unknown tag is ignored."""
        names = _names(tag)
        with suppress(UnknownTagError):
            ms.release(names)
            self.retained_tags.difference_update(names or self.retained_tags)

    def resume(self, tag: str | None) -> None:
        """Resume a tag, or all, and drop the backups unless they are retained. Their memory is unpinned once the host
        needs it; at once if ``mmap`` was asked for. An unknown tag is ignored."""
        names = _names(tag)
        try:
            ms.resume(names)
        except UnknownTagError:
            return
        if (saver := process.existing_saver()) is None:
            return
        if self.retaining:
            self.retained_tags.update(names or saver.known_tags())
        else:
            self.retained_tags.difference_update(names or self.retained_tags)
            saver.drop_backups(names, keep_memory=True)
            if self.frees_at_once:
                saver.trim_backup_memory(at_once=True)
            else:
                self._spare.keep(saver)

    def register_operations(self, path: str) -> None:
        """Let C code in this process pause and resume, by ``tms_pause`` and ``tms_resume`` of the preload library."""
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)

        def from_c(operation: Callable[[str | None], None]) -> Any:
            def run(tag: bytes | None) -> int:
                try:
                    self.initialize()
                    operation(tag.decode() if tag else None)
                except Exception:
                    logger.exception("tms_%s(%r) failed", operation.__name__, tag)
                    return 1
                return 0

            return kind(run)

        self._callbacks.extend([from_c(self.pause), from_c(self.resume)])
        ctypes.CDLL(path).memsaver_preload_set_operations(*self._callbacks)


def _names(tag: str | None) -> list[str]:
    """Return the tags to move, none for all. Raises AttributeError, as torch_memory_saver, if this is no string."""
    return [tag] if tag and tag.encode() else []


def set_disk_folder(folder: str) -> None:
    """As ``TorchMemorySaver.set_disk_backup_dir``."""
    os.makedirs(folder, exist_ok=True)
    if process.enabled():
        process.saver().set_file_folder(folder)


def preloaded() -> list[str]:
    return os.environ.get("LD_PRELOAD", "").replace(":", " ").split()


this_process = State()


@cache
def attach_library() -> str:
    """Connect the preload library, if this process was started with it, to the saver; return its path, or an empty
    string. Takes it out of ``LD_PRELOAD``, so that children do not inherit it, unless ``MEMSAVER_PRELOAD_INHERIT=1``.
    With ``TMS_INIT_ENABLE=1`` the saver is made at once, as allocations may come at any time. Raises ConfigurationError
    if it is another version's, or an environment variable cannot be used."""
    library = _native.attach_preload_library(ZEROED_TAGS) if process.enabled() else ""
    if library:
        this_process.register_operations(library)
        if not flag("MEMSAVER_PRELOAD_INHERIT"):
            others = [each for each in preloaded() if os.path.realpath(each) != os.path.realpath(library)]
            set_variable("LD_PRELOAD", ":".join(others) or None)
        if flag("TMS_INIT_ENABLE"):
            this_process.initialize()
    return library
