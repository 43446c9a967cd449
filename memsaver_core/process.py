"""Memsaver in this process: its settings, its kind of device and its one saver."""

from __future__ import annotations

import atexit
import threading
from functools import lru_cache
from typing import Any

import torch

from memsaver_core import _native
from memsaver_core.backends import Backend
from memsaver_core.backends.cuda import CudaBackend
from memsaver_core.backends.host import HostBackend
from memsaver_core.contract.errors import ConfigurationError
from memsaver_core.settings import CoreSettings
from memsaver_core.tensor_sharing import refuse_to_share

#: The saver is made at the first use and kept until the process ends.
_lock = threading.Lock()
_settings: CoreSettings | None = None
_backend: Backend | None = None
_saver: _native.Saver | None = None


def core_settings() -> CoreSettings:
    """Return the settings in force: what ``configure`` was given, on top of the environment. Raises ConfigurationError
    if an environment variable has a value that cannot be used."""
    global _settings
    if _settings is None:
        _settings = CoreSettings()
    return _settings


def configure(**values: Any) -> None:
    """Set settings (the fields of ``CoreSettings``) for this process, before the first use. Raises ConfigurationError
    if a value cannot be used, or the saver exists already."""
    global _settings
    with _lock:
        if _saver is not None:
            raise ConfigurationError("memsaver is in use already; call configure() before the first region()")
        _settings = CoreSettings(**values)


def enabled() -> bool:
    """Return whether memsaver does anything in this process."""
    return core_settings().enabled


def backend() -> Backend:
    """Return the kind of device that is used; before the saver exists, the one that would be used now."""
    if _backend is not None:
        return _backend
    values = core_settings()
    driver: str = values.driver if values.enabled else "none"
    if driver == "auto":
        driver = "cuda" if torch.cuda.is_available() and not _native.cuda_missing() else "host"
    return _backend_for(driver)


def driver_name() -> str:
    """Return ``cuda`` or ``host``, whichever is or would be used; ``none`` if memsaver is disabled."""
    return backend().name


def torch_device(index: int = 0) -> torch.device:
    """Return the torch device whose memory the saver manages as device ``index``."""
    return backend().torch_device(index)


def existing_saver() -> _native.Saver | None:
    """Return the saver; None if none was made yet."""
    return _saver


def known_tags() -> list[str]:
    """Return the tags that regions of this process have used."""
    return [] if _saver is None else _saver.known_tags()


def saver() -> _native.Saver:
    """Return the saver; makes it at the first call. Raises ConfigurationError if the driver that the settings name
    cannot be used here, ForkedProcessError if this process was forked from one that uses memsaver."""
    with _lock:
        if _saver is None:
            return _make_saver()
        _saver.check_process()
        return _saver


def _make_saver() -> _native.Saver:
    global _saver, _backend
    values, kind = core_settings(), backend()
    kind.prepare()
    made = _native.Saver(
        driver=kind.name,
        host_devices=[name.strip() for name in values.host_device.split(",") if name.strip()],
        host_capacity=int(values.host_capacity),
        host_backup_limit=int(values.host_backup_limit),
        file_folder=values.file_dir,
        retention=values.retention,
        verify=values.verify,
        pack=values.pack == "auto",
        shared_backups=values.shared_backups,
        peer_access=values.peer_access,
    )
    _native.activate(made)
    refuse_to_share(made)
    _saver, _backend = made, kind
    # torch frees what regions hold until the very end of the process, when the driver is gone.
    atexit.register(made.close)
    return made


@lru_cache
def _backend_for(driver: str) -> Backend:
    kinds: dict[str, type[Backend]] = {"cuda": CudaBackend, "host": HostBackend}
    return kinds.get(driver, Backend)()
