"""Ranks of a communicator without a GPU: processes that have loaded the library of ``fake_nccl.cpp``."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.native import build
from tests.programs import Child

#: What a suspend of one communicator gives back, and what stays; constants of fake_nccl.cpp.
SUSPENDABLE_BYTES, PERSISTENT_BYTES = 8 << 20, 1 << 20

#: Defines ``library``, and ``join(path, ranks, rank)``, which returns the new communicator as a number.
PRELUDE = """
import ctypes
library = ctypes.CDLL(LIBRARY)

class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]

def join(path, ranks, rank):
    comm = ctypes.c_void_p()
    assert library.ncclCommInitRank(ctypes.byref(comm), ranks, UniqueId(path.encode()), rank) == 0
    return comm.value

def fail(comm, call, result):
    library.fake_nccl_fail(ctypes.c_void_p(comm), call.encode(), result)
"""

_LOOP = """
import sys
import memsaver_core as ms
from memsaver_core import communicators
ranks, rank, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
comms = {}
for name in NAMES:
    comms[name] = join(f"{folder}/{name}", ranks, rank)
    communicators.register(name, comms[name], ranks=ranks, rank=rank)
print("ready", flush=True)
for line in sys.stdin:
    try:
        print(repr(eval(line)), flush=True)
    except ms.MemsaverError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
"""


def library(version: int = 23007) -> Path:
    """The library, as NCCL of a version that can suspend (23007) or of one that cannot (22809)."""
    return build.built(f"fake_nccl_{version}") / f"nccl-{version}" / "libnccl.so.2"


def prelude(version: int = 23007) -> str:
    """Code for the start of a program that makes communicators."""
    return f"LIBRARY = {str(library(version))!r}\n{textwrap.dedent(PRELUDE)}"


class Ranks:
    """Processes of one communicator each; every one evaluates expressions and answers with what they gave."""

    def __init__(self, children: list[Child]) -> None:
        self.children = children

    def ask(self, expression: str, ranks: list[int] | None = None) -> list[str]:
        """Evaluate ``expression`` on ``ranks`` (None: on all) at once."""
        asked = [self.children[rank] for rank in (range(len(self.children)) if ranks is None else ranks)]
        with ThreadPoolExecutor(len(asked)) as pool:
            return list(pool.map(lambda child: child.ask(expression), asked))


@contextmanager
def started(
    ranks: int,
    folder: Path,
    *,
    names: tuple[str, ...] = ("tp",),
    version: int = 23007,
    inherited: Mapping[str, str] = os.environ,
    **environment: str,
) -> Iterator[Ranks]:
    """Start ``ranks`` processes that share communicators called ``names``."""
    code = prelude(version) + f"NAMES = {names!r}\n" + _LOOP
    with ExitStack() as stack:
        children = []
        for rank in range(ranks):
            child = Child("-c", code, str(ranks), str(rank), str(folder), inherited=inherited, **environment)
            children.append(stack.enter_context(child))
        assert [child.read_line() for child in children] == ["ready"] * ranks
        yield Ranks(children)
