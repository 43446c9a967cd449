"""The one saver of this process: made at the first use, kept until the end."""

from __future__ import annotations

import atexit
import importlib.util
import os
import pathlib
import threading
from typing import Any

import torch

from memsaver_core import _native
from memsaver_core.errors import ConfigurationError, ForkedProcessError
from memsaver_core.settings import CoreSettings
from memsaver_core.tensor_sharing import refuse_to_share

_lock = threading.Lock()
_settings: CoreSettings | None = None
_saver: _native.Saver | None = None
_pid: int | None = None


def settings() -> CoreSettings:
    """The settings in force: what ``configure`` was given, on top of the environment."""
    global _settings
    if _settings is None:
        try:
            _settings = CoreSettings()
        except ValueError as error:
            raise ConfigurationError(f"a MEMSAVER_ setting cannot be used: {error}") from error
    return _settings


def configure(**values: Any) -> None:
    """Set settings (the fields of ``CoreSettings``) for this process, before the first use.

    Raises:
        ConfigurationError: a value cannot be used, or the saver exists already.
    """
    global _settings
    with _lock:
        if _saver is not None:
            raise ConfigurationError("memsaver is in use already; call configure() before the first region()")
        try:
            _settings = CoreSettings(**values)
        except ValueError as error:
            raise ConfigurationError(f"a setting cannot be used: {error}") from error


def enabled() -> bool:
    """Whether memsaver does anything in this process."""
    return settings().enabled


def driver_name() -> str:
    """``cuda`` or ``host``, whichever is or would be used; ``none`` where memsaver is disabled."""
    if not enabled():
        return "none"
    choice = settings().driver
    if choice == "auto":
        return "cuda" if torch.cuda.is_available() and not _native.cuda_missing() else "host"
    return choice


def existing_saver() -> _native.Saver | None:
    """The saver, if there is one."""
    return _saver


def saver() -> _native.Saver:
    """The saver, made now if need be.

    Raises:
        ConfigurationError: the driver that was asked for cannot be used here.
        ForkedProcessError: this process was forked from one that uses memsaver.
    """
    global _saver, _pid
    with _lock:
        if _saver is None:
            values = settings()
            driver = driver_name()
            if driver == "cuda":
                _native.set_nvrtc_path(_nvrtc_path())
            _saver = _native.Saver(
                driver=driver,
                host_devices=[name.strip() for name in values.host_device.split(",") if name.strip()],
                host_capacity=int(values.host_capacity),
                host_backup_limit=int(values.host_backup_limit),
                file_folder=values.file_dir,
                retention=values.retention,
                verify=values.verify,
                peer_access=values.peer_access,
            )
            _native.activate(_saver)
            refuse_to_share(_saver)
            _pid = os.getpid()
            # torch frees what regions hold until the very end of the process, when the driver is gone.
            atexit.register(_saver.close)
        elif _pid != os.getpid():
            raise ForkedProcessError(
                f"memsaver was set up in process {_pid} and cannot be used in its forked child {os.getpid()}; "
                "start workers with the 'spawn' method"
            )
        return _saver


def torch_device(index: int = 0) -> torch.device:
    """The torch device whose memory the saver manages as device ``index``."""
    return torch.device("cuda", index) if driver_name() == "cuda" else torch.device("cpu")


def _nvrtc_path() -> str:
    """The NVRTC library that torch's packages bring along, or an empty string."""
    for package in ("nvidia.cu13", "nvidia.cuda_nvrtc", "nvidia.cu12"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in spec.submodule_search_locations or () if spec else ():
            for library in sorted(pathlib.Path(folder).glob("lib/libnvrtc.so.*")):
                return str(library)
    return ""
