"""What the compatibility API holds for the whole process, made at its first use."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import memsaver_core as ms
from memsaver_core import _native, process
from memsaver_core.errors import ConfigurationError, UnknownTagError

logger = logging.getLogger(__name__)


class MisuseError(ConfigurationError, AssertionError):
    """A call that torch_memory_saver answers with a failed assertion; the message says what to do."""


_TRUE = ("1", "true", "TRUE", "yes", "YES")
_FALSE = ("0", "false", "FALSE", "no", "NO")

_lock = threading.Lock()
_library: str | None = (
    None  # the preload library of this process; "" where there is none, None before it was looked for
)
_callbacks: list[Any] = []  # the library calls them for as long as the process lives
_initialized = False
_retaining = False
_retained_tags: set[str] = set()  # resumed last with their backup retained


def flag(name: str) -> bool:
    """An environment variable that is 1 or 0 (true, yes, false, no); 0 where it is not set.

    Raises:
        ConfigurationError: it is anything else.
    """
    value = os.environ.get(name)
    if value is None or value in _FALSE:
        return False
    if value in _TRUE:
        return True
    raise ConfigurationError(f"{name}={value!r} cannot be used; set it to 1 or 0")


def check_backend(value: str, name: str = "a CPU backup backend") -> str:
    """Return ``value``, a kind of backup memory; an empty string is the default's. ``name`` is what errors call it.

    Raises:
        ConfigurationError: there is no such kind.
    """
    if value not in ("", "pinned", "mmap"):
        raise ConfigurationError(f"{name} is 'pinned' or 'mmap', not {value!r}")
    return value


def attach_library() -> str:
    """Connect the preload library, if this process was started with it, to the saver; returns its path or ``""``.

    It leaves ``LD_PRELOAD`` then, so that what this process starts does not inherit it, unless
    ``MEMSAVER_PRELOAD_INHERIT=1``. Where ``TMS_INIT_ENABLE=1`` the saver is made at once: allocations come any time.

    Raises:
        ConfigurationError: the library is another version's, or an environment variable cannot be used.
    """
    global _library
    with _lock:
        if _library is not None:
            return _library
        _library = _native.attach_preload_library() if process.enabled() else ""
    if _library:
        _register_operations(_library)
        if not flag("MEMSAVER_PRELOAD_INHERIT"):
            _leave_ld_preload(_library)
        if flag("TMS_INIT_ENABLE"):
            initialize()
    return _library


def initialize() -> None:
    """Make the saver and apply the environment variables. Does nothing from the second time on.

    Raises:
        ConfigurationError: one of them cannot be used.
    """
    global _initialized, _retaining
    with _lock:
        if _initialized:
            return
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            if "expandable_segments:True" in os.environ.get(name, ""):
                raise ConfigurationError(
                    f"{name}: expandable_segments is not supported, torch takes such memory past every hook; remove it"
                )
        check_backend(os.environ.get("TMS_INIT_CPU_BACKUP_BACKEND", ""), "TMS_INIT_CPU_BACKUP_BACKEND")
        if flag("TMS_INIT_ENABLE_CPU_BACKUP") and flag("TMS_INIT_ENABLE_DISK_BACKUP"):
            raise ConfigurationError("TMS_INIT_ENABLE_CPU_BACKUP and TMS_INIT_ENABLE_DISK_BACKUP exclude each other")
        _retaining = flag("TMS_RETAIN_CPU_BACKUP")
        folder = os.environ.get("TMS_DISK_BACKUP_DIR")
        if folder and process.enabled():
            set_disk_folder(folder)
        if process.enabled():
            process.saver()
        _initialized = True


def set_disk_folder(folder: str) -> None:
    """Backups on disk go to ``folder`` from now on; it is made where it is missing.

    Raises:
        ConfigurationError: what is paused has its backup in the present one.
    """
    os.makedirs(folder, exist_ok=True)
    if process.enabled():
        process.saver().set_file_folder(folder)


def pause(tag: str | None) -> None:
    """Release a tag, or all where it is None or empty. A tag that nothing is under is passed over."""
    names = [tag] if tag else []
    try:
        ms.release(names)
    except UnknownTagError:
        return
    _forget(names)


def resume(tag: str | None) -> None:
    """Resume a tag, or all; backups then go, unless they are retained. A tag that nothing is under is passed over."""
    names = [tag] if tag else []
    try:
        ms.resume(names)
    except UnknownTagError:
        return
    saver = process.existing_saver()
    if saver is None:
        return
    if _retaining:
        _retained_tags.update(names or saver.known_tags())
    else:
        _forget(names)
        saver.drop_backups(names)


def retaining() -> bool:
    """Whether a resume leaves backups in host memory."""
    return _retaining


def set_retaining(value: bool) -> None:
    """Decide what the next resume does with backups."""
    global _retaining
    _retaining = value


def is_retained(tag: str) -> bool:
    """Whether the last resume of ``tag`` left its backup in place."""
    return tag in _retained_tags


def _forget(names: list[str]) -> None:
    if names:
        _retained_tags.difference_update(names)
    else:
        _retained_tags.clear()


def _register_operations(path: str) -> None:
    """Let C code in this process pause and resume: ``tms_pause`` and ``tms_resume`` of the preload library."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)

    def from_c(operation: Callable[[str | None], None]) -> Any:
        def run(tag: bytes | None) -> int:
            try:
                initialize()
                operation(tag.decode() if tag else None)
            except Exception:
                logger.exception("tms_%s(%r) failed", operation.__name__, tag)
                return 1
            return 0

        return kind(run)

    _callbacks.extend([from_c(pause), from_c(resume)])
    ctypes.CDLL(path).memsaver_preload_set_operations(*_callbacks)


def _leave_ld_preload(path: str) -> None:
    present = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    others = [each for each in present if os.path.realpath(each) != os.path.realpath(path)]
    if others:
        os.environ["LD_PRELOAD"] = ":".join(others)
    else:
        os.environ.pop("LD_PRELOAD", None)
