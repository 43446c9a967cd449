"""Memsaver in this process: its settings, its kind of device and its one saver."""

from __future__ import annotations

import atexit
import os
import threading
from functools import lru_cache
from typing import Any

import torch

from memsaver_core import _native
from memsaver_core.backends import Backend
from memsaver_core.errors import ConfigurationError, ForkedProcessError
from memsaver_core.settings import CoreSettings
from memsaver_core.tensor_sharing import refuse_to_share


class Process:
    """What exists once in a process. The saver is made at the first use and kept until the process ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._settings: CoreSettings | None = None
        self._backend: Backend | None = None
        self._saver: _native.Saver | None = None
        self._pid: int | None = None

    def settings(self) -> CoreSettings:
        """Return the settings in force: what ``configure`` was given, on top of the environment.

        Raises:
            ConfigurationError: an environment variable has a value that cannot be used.
        """
        if self._settings is None:
            self._settings = CoreSettings()
        return self._settings

    def configure(self, **values: Any) -> None:
        """Set settings (the fields of ``CoreSettings``) for this process, before the first use.

        Raises:
            ConfigurationError: a value cannot be used, or the saver exists already.
        """
        with self._lock:
            if self._saver is not None:
                raise ConfigurationError("memsaver is in use already; call configure() before the first region()")
            self._settings = CoreSettings(**values)

    def enabled(self) -> bool:
        """Return whether memsaver does anything in this process."""
        return self.settings().enabled

    def backend(self) -> Backend:
        """Return the kind of device that is used; before the saver exists, the one that would be used now."""
        if self._backend is not None:
            return self._backend
        values = self.settings()
        driver: str = values.driver if values.enabled else "none"
        if driver == "auto":
            driver = "cuda" if torch.cuda.is_available() and not _native.cuda_missing() else "host"
        return _backend_for(driver)

    def driver_name(self) -> str:
        """Return ``cuda`` or ``host``, whichever is or would be used; ``none`` if memsaver is disabled."""
        return self.backend().name

    def torch_device(self, index: int = 0) -> torch.device:
        """Return the torch device whose memory the saver manages as device ``index``."""
        return self.backend().torch_device(index)

    def existing_saver(self) -> _native.Saver | None:
        """Return the saver, or None if there is none yet."""
        return self._saver

    def saver(self) -> _native.Saver:
        """Return the saver; makes it at the first call.

        Raises:
            ConfigurationError: the driver that the settings name cannot be used here.
            ForkedProcessError: this process was forked from one that uses memsaver.
        """
        with self._lock:
            if self._saver is None:
                self._make_saver()
            elif self._pid != os.getpid():
                raise ForkedProcessError(
                    f"memsaver was set up in process {self._pid} and cannot be used in its forked child {os.getpid()}; "
                    "start workers with the 'spawn' method"
                )
            assert self._saver is not None
            return self._saver

    def _make_saver(self) -> None:
        values = self.settings()
        backend = self.backend()
        backend.prepare()
        saver = _native.Saver(
            driver=backend.name,
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
        _native.activate(saver)
        refuse_to_share(saver)
        self._saver, self._backend, self._pid = saver, backend, os.getpid()
        # torch frees what regions hold until the very end of the process, when the driver is gone.
        atexit.register(saver.close)


@lru_cache
def _backend_for(driver: str) -> Backend:
    if driver == "cuda":
        from memsaver_core.backends.cuda import CudaBackend

        return CudaBackend()
    if driver == "host":
        from memsaver_core.backends.host import HostBackend

        return HostBackend()
    return Backend()


this_process = Process()
settings = core_settings = this_process.settings
configure = this_process.configure
enabled = this_process.enabled
backend = this_process.backend
driver_name = this_process.driver_name
torch_device = this_process.torch_device
existing_saver = this_process.existing_saver
saver = this_process.saver
