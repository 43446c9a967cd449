"""Builds the native test programs, incrementally between runs."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11

ROOT = Path(__file__).parents[2]


@functools.cache
def built() -> Path:
    """The folder of the built programs."""
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
    assert cmake is not None, "cmake is among the build tools of constraints.txt"
    folder = ROOT / "build" / "native-tests"
    options = [
        "-GNinja",  # compiles in parallel
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


def small_module() -> Path:
    """The Python module of a core with small units, in which a few pages are several blocks, chunks, windows and
    slices.

    It registers the same types as ``memsaver_core._native``, so a process can load only one of them.
    """
    (module,) = built().glob("_native_small.*.so")
    return module


def run(program: Path, *arguments: str) -> str:
    """The output of a program that must succeed."""
    result = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
