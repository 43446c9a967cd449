"""Builds and runs the tests of the core that need no Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def build() -> Path:
    """The folder with the built tests; kept between runs, so that only what changed is built."""
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
    assert cmake is not None, "cmake is among the build tools of constraints.txt"
    folder = ROOT / "build" / "native-tests"
    options = [
        "-DCMAKE_BUILD_TYPE=Release",
        "-DMEMSAVER_NATIVE_TESTS=ON",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    for command in (
        [cmake, "-S", str(ROOT), "-B", str(folder), *options],
        [cmake, "--build", str(folder), "--parallel", "2"],
    ):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    return folder


def run(program: Path, *arguments: str) -> None:
    result = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("driver", ["host", "faulty"])
def test_driver_contract(build: Path, driver: str) -> None:
    run(build / "driver_contract", driver)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_driver_contract_on_cuda(build: Path) -> None:
    run(build / "driver_contract", "cuda")


def test_saver_under_threads(build: Path) -> None:
    run(build / "saver_threads")


def test_declarations_match_the_toolkit(build: Path) -> None:
    """Where cuda.h is at hand, building this program has compared our declarations with it."""
    program = build / "cuda_abi"
    if not program.exists():
        pytest.skip("there is no cuda.h here")
    run(program)
