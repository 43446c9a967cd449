"""Let clang check the lock rules of csrc (csrc/support/mutex.hpp): -Wthread-safety, syntax only, nothing is built.

The clang and every header come from the ziglang package. Asked for directly, it starts without zig's own driver, which
would make an object of every file. The standard headers are parsed once for all files.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from os import cpu_count
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
# The bindings hold no lock of the core's, and would need the headers of Python and pybind11.
SOURCES = [path for path in sorted((ROOT / "csrc").rglob("*.cpp")) if path.parent.name != "python"]
STANDARD_HEADER = re.compile(r"^#include <\w+>", re.MULTILINE)
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
    texts = [path.read_text() for path in (ROOT / "csrc").rglob("*.[ch]pp")]
    headers = sorted({line for text in texts for line in STANDARD_HEADER.findall(text)})
    with TemporaryDirectory() as folder, ThreadPoolExecutor(cpu_count()) as pool:
        standard, parsed = Path(folder, "standard.hpp"), Path(folder, "standard.pch")
        standard.write_text("\n".join(headers))
        subprocess.run([*clang, "-x", "c++-header", standard, "-o", parsed], check=True)

        def check(path: Path) -> int:
            return subprocess.run([*clang, "-fsyntax-only", "-include-pch", parsed, path], check=False).returncode

        sys.exit(1 if any(list(pool.map(check, SOURCES))) else 0)


if __name__ == "__main__":
    main()
