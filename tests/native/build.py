"""Builds the native test programs, incrementally between runs."""

from __future__ import annotations

import fcntl
import functools
import shutil
import subprocess
import sys
import sysconfig
from itertools import chain
from pathlib import Path

import pybind11

ROOT = Path(__file__).parents[2]
_PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"
#: Where an editable installation compiles the product.
PRODUCT = ROOT / "build" / f"{_PYTHON}-{_PYTHON}-{sysconfig.get_platform().replace('-', '_')}"


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
        objects = f"-DMEMSAVER_PRODUCT_OBJECTS={';'.join(map(str, _product_objects()))}"
        for command in (
            [cmake, "-S", str(ROOT), "-B", str(folder), *options, objects],
            [cmake, "--build", str(folder), "--parallel", "2", "--target", target],
        ):
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            assert result.returncode == 0, result.stdout + result.stderr
    return folder


def _product_objects() -> list[Path]:
    """What the product's module was linked from; none if that is missing or older than a source."""
    compiled = [PRODUCT.glob(f"CMakeFiles/memsaver_{each}_objects.dir/*/*.o") for each in ("core", "python")]
    objects = list(chain(*compiled))
    sources = [ROOT / "CMakeLists.txt", *filter(Path.is_file, (ROOT / "csrc").rglob("*"))]
    newest = max(source.stat().st_mtime for source in sources)
    return objects if all(each.stat().st_mtime > newest for each in objects) else []


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
