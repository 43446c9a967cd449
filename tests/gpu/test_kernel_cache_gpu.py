"""Compiled kernels are cached between processes, in files that only their owner can write."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.programs import output_of

pytestmark = pytest.mark.gpu

DIGEST = """
import torch, memsaver_core as ms
from memsaver_core import _native, process
with ms.region("t"):
    tensor = torch.arange(1 << 20, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
key = (1, 2, 3, 4)
assert process.saver().digest(0, tensor.data_ptr(), tensor.nbytes, key) == _native.digest_of(tensor.cpu().numpy(), key)
"""


def digest(cache: Path) -> None:
    """Compute a digest in a new process, which must run our kernel and nothing else."""
    output_of(DIGEST, XDG_CACHE_HOME=str(cache))


def kernels(cache: Path) -> list[Path]:
    return list((cache / "memsaver").glob("digest-*.cubin"))


def test_kernels_that_others_could_have_written_are_not_run(tmp_path: Path) -> None:
    digest(tmp_path)
    [kernel] = kernels(tmp_path)
    code = kernel.read_bytes()
    assert stat.S_IMODE(kernel.stat().st_mode) == 0o600
    assert stat.S_IMODE(kernel.parent.stat().st_mode) == 0o700
    kernel.write_bytes(b"not machine code")
    kernel.chmod(0o622)
    digest(tmp_path)
    assert kernels(tmp_path) == [kernel]
    assert (kernel.read_bytes(), stat.S_IMODE(kernel.stat().st_mode)) == (code, 0o600)
    kernel.unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"not machine code")
    kernel.symlink_to(elsewhere)
    digest(tmp_path)
    assert not kernel.is_symlink()
    assert elsewhere.read_bytes() == b"not machine code"


PREPARED = """
import torch, memsaver_core as ms
with ms.region("weights", restore="host"):
    tensor = torch.ones(1 << 20, dtype=torch.uint8, device="cuda")
ms.prepare_backup()
"""


def test_the_kernel_is_compiled_before_the_first_release(tmp_path: Path) -> None:
    output_of(PREPARED, XDG_CACHE_HOME=str(tmp_path))
    [kernel] = kernels(tmp_path)
    code = kernel.read_bytes()
    digest(tmp_path)
    assert kernel.read_bytes() == code
