"""Builds the native test programs, incrementally between runs."""

from __future__ import annotations

import fcntl
import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11

ROOT = Path(__file__).parents[2]


@functools.cache
def built(target: str = "all") -> Path:
    """The folder with the built programs, once ``target`` is up to date."""
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
    assert cmake is not None, "cmake is among the build tools of constraints.txt"
    folder = ROOT / "build" / "native-tests"
    folder.mkdir(parents=True, exist_ok=True)
    options = [
        "-GNinja",  # compiles in parallel
        "-DCMAKE_BUILD_TYPE=Release",
        "-DMEMSAVER_NATIVE_TESTS=ON",
        # To compile takes longer than to run, so little is optimized.
        "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG",
        "-DCMAKE_INTERPROCEDURAL_OPTIMIZATION=OFF",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one run of the tests builds at a time
        for command in (
            [cmake, "-S", str(ROOT), "-B", str(folder), *options],
            [cmake, "--build", str(folder), "--parallel", "2", "--target", target],
        ):
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            assert result.returncode == 0, result.stdout + result.stderr
    return folder


def faulty_module() -> Path:
    """The product's Python module with drivers that fail on request, beside the helper program with steps that do."""
    (module,) = (built("faulty") / "faulty").glob("_native.*.so")
    return module


def small_module() -> Path:
    """The same on a core with small units: a few pages are several blocks, chunks, windows and slices."""
    (module,) = (built("small_module") / "small").glob("_native.*.so")
    return module


def run(program: Path, *arguments: str) -> str:
    """The output of a program that must succeed, within the time limit of the test."""
    result = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
