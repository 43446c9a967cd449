"""Builds and runs the core's tests that need no Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memsaver_core.backends.cuda import _nvrtc_path
from tests.native.build import built, run

pytestmark = pytest.mark.timeout(1200)  # the first one builds everything


@pytest.fixture(scope="module")
def build() -> Path:
    return built()


@pytest.mark.parametrize("driver", ["host", "faulty"])
def test_driver_contract(build: Path, driver: str) -> None:
    run(build / "driver_contract", driver)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_driver_contract_on_cuda(build: Path) -> None:
    run(build / "driver_contract", "cuda")


def test_saver_under_threads(build: Path) -> None:
    run(build / "saver_threads")


@pytest.mark.guards(
    "each of several replicas pinned its own copy of the same weights",
    "the process that had written a shared backup died",
)
def test_shared_store_of_several_processes(build: Path) -> None:
    """One copy; limits; two users and two keys; stopped processes; one killed at each of its steps."""
    run(build / "shared_store")


def test_links_of_idle_devices(build: Path) -> None:
    """Content comes over them, and whole if a lender ends, stops or uses its device again."""
    run(build / "links")


def test_packed_content_comes_back(build: Path) -> None:
    run(build / "packing")


def test_kernels_that_pack_on_the_cpu(build: Path) -> None:
    """Lane by lane, they do what the implementation for the host does."""
    run(build / "packing_lanes")


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_kernels_that_pack_compile(
    build: Path, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = _nvrtc_path()
    if not library:
        pytest.skip("NVRTC is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(Path(library).parent))  # where it looks for its own parts
    assert run(build / "packing_kernels", library, architecture).endswith(" bytes\n")


def test_declarations_match_the_toolkit(build: Path) -> None:
    """If cuda.h is present, compiling this program has compared our declarations with it."""
    program = build / "cuda_abi"
    if not program.exists():
        pytest.skip("there is no cuda.h here")
    run(program)
