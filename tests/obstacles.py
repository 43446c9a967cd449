"""Reasons against a hibernation that this machine does not have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from memsaver_core.contract.status import CommunicatorStatus
from memsaver_core.hibernation import helper, preconditions
from memsaver_core.process import core_settings


@contextmanager
def put_in(
    *,
    has_context: bool = True,
    has_helper: bool = True,
    can_checkpoint: bool = True,
    mps: str = "",
    communicators: Sequence[CommunicatorStatus] = (),
    ipc_tensors: int = 0,
    peers: Sequence[tuple[int, int]] = (),
    managed_bytes: int = 0,
    imported_bytes: int = 0,
    sharing: Sequence[str] = (),
    others: Sequence[str] = (),
) -> Iterator[None]:
    """In the block, what prevents a hibernation of this process is this and nothing else."""
    backend = SimpleNamespace(has_context=has_context, peers=lambda saver, peer_access: peers)
    modules = {
        "process": SimpleNamespace(backend=lambda: backend, existing_saver=lambda: None, core_settings=core_settings),
        "communicators": SimpleNamespace(found=lambda: communicators, shared=lambda: sharing),
        "shared_buffers": SimpleNamespace(imported_bytes=lambda: imported_bytes),
        "_native": SimpleNamespace(can_checkpoint=lambda: can_checkpoint),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setattr(preconditions, name, module)
        if not has_helper:
            patch.setattr(helper, "PATH", Path("/nowhere/memsaver-hibernate"))
        patch.setattr(preconditions, "mps_pipe", lambda: mps)
        patch.setattr(preconditions, "ipc_tensors", lambda: ipc_tensors)
        patch.setattr(preconditions, "managed_bytes", lambda: managed_bytes)
        patch.setattr(preconditions, "_checks", [lambda: list(others)])
        yield
