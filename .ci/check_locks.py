"""Let clang check the lock rules of csrc (csrc/support/mutex.hpp): -Wthread-safety, syntax only, nothing is built.

The clang and every header come from the ziglang package. Asked for directly, it starts without zig's own driver, which
would make an object of every file. As in the build, files that are compiled together are parsed in one piece.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from os import cpu_count
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The bindings hold no lock of the core's, and would need the headers of Python and pybind11.
SOURCES = [path for path in sorted((ROOT / "csrc").rglob("*.cpp")) if path.parent.name != "python"]
# Each is a program or a library of its own; all others are one.
APART = ("hibernate", "hooks/preload_library.cpp")
WARNINGS = ("-Wthread-safety", "-Wthread-safety-beta", "-Werror")
# What zig tells its libc++ and glibc.
DEFINES = (
    "__GLIBC_MINOR__=28",
    "_LIBCPP_ABI_VERSION=1",
    "_LIBCPP_ABI_NAMESPACE=__1",
    "_LIBCPP_HAS_THREADS=1",
    "_LIBCPP_HAS_MONOTONIC_CLOCK",
    "_LIBCPP_HAS_TERMINAL",
    "_LIBCPP_HAS_MUSL_LIBC=0",
    "_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS=0",
    "_LIBCPP_HAS_FILESYSTEM=1",
    "_LIBCPP_HAS_RANDOM_DEVICE",
    "_LIBCPP_HAS_LOCALIZATION",
    "_LIBCPP_HAS_UNICODE",
    "_LIBCPP_HAS_WIDE_CHARACTERS",
    "_LIBCPP_HAS_NO_STD_MODULES",
    "_LIBCPP_HAS_TIME_ZONE_DATABASE",
    "_LIBCPP_PSTL_BACKEND_SERIAL",
    "_LIBCPP_HARDENING_MODE=_LIBCPP_HARDENING_MODE_NONE",
    "_LIBCPP_ASSERTION_SEMANTIC_DEFAULT=_LIBCPP_ASSERTION_SEMANTIC_IGNORE",
)


def command(zig: Path) -> list[str]:
    machine = platform.machine()
    family = "x86" if machine == "x86_64" else machine
    libc = zig / "lib/libc/include"
    folders = (
        zig / "lib/libcxx/include",
        zig / "lib/libcxxabi/include",
        zig / "lib/include",
        *(libc / name for name in (f"{family}-linux-gnu", "generic-glibc", f"{family}-linux-any", "any-linux-any")),
    )
    return [
        *(str(zig / "zig"), "clang", "-target", f"{machine}-linux-gnu", "-std=c++17", "-nostdinc", "-nostdinc++"),
        *WARNINGS,
        *(f"-D{define}" for define in DEFINES),
        *(part for folder in folders for part in ("-isystem", str(folder))),
        f"-I{ROOT / 'csrc'}",
    ]


def main() -> None:
    spec = find_spec("ziglang")
    if spec is None or spec.origin is None:
        sys.exit("ziglang is not installed: pip install -c constraints.txt 'memsaver[lint]'")
    clang = command(Path(spec.origin).parent)
    pieces: dict[str, list[Path]] = defaultdict(list)
    for path in SOURCES:
        name = path.relative_to(ROOT / "csrc").as_posix()
        pieces[next((each for each in APART if name.startswith(each)), "")].append(path)

    def check(piece: list[Path]) -> int:
        text = "".join(f'#include "{path}"\n' for path in piece)
        return subprocess.run(
            [*clang, "-fsyntax-only", "-x", "c++", "-"], input=text, text=True, check=False
        ).returncode

    with ThreadPoolExecutor(cpu_count()) as pool:
        sys.exit(1 if any(list(pool.map(check, pieces.values()))) else 0)


if __name__ == "__main__":
    main()
