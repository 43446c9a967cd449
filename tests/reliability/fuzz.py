"""Fuzzes how requests are read, followed by coverage of the code that reads them.

python -m tests.reliability.fuzz [--runs N] [--seconds S] [--target TARGET]

    fields      query, headers, body and key of each kind of call
    signatures  TensorRT-LLM's signed calls
    engine      the bodies that the reference engine reads itself: generation, and new weights
    wire        bytes of a connection, through the whole service, on every path

Each is a file, ``fuzz_TARGET.py``, which says how its inputs look, and a process. Whatever the input is, it is either
understood or refused with an answer; it is never let in without the key. The last line printed is JSON. An input that
breaks this is written to build/reliability and named.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import ModuleType

import atheris

with atheris.instrument_imports(include=["memsaver_server", "h11", "uvicorn"], enable_loader_override=False):
    from tests.reliability import fuzz_engine, fuzz_fields, fuzz_inputs, fuzz_signatures, fuzz_wire

from tests.reliability.figures import FOLDER

TARGETS: dict[str, ModuleType] = {
    "fields": fuzz_fields,
    "signatures": fuzz_signatures,
    "engine": fuzz_engine,
    "wire": fuzz_wire,
}
LONGEST = 4096


def fuzz(target: ModuleType, runs: int, seconds: int, seed: int, folder: Path) -> None:
    """Ends the process: with 0, or with a traceback if an input breaks something."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, text in enumerate(target.SEEDS):
        (corpus / f"{number}").write_bytes(text)
    words = folder / "words"
    words.write_text("".join(f"{quoted(word)}\n" for word in target.DICTIONARY))
    limits = [f"-runs={runs}"] if runs else []
    options = [f"-max_len={LONGEST}", f"-seed={seed}", f"-max_total_time={seconds}", "-timeout=10", f"-dict={words}"]
    options.append(f"-artifact_prefix={FOLDER}/broken-")
    read = target.Target().read

    def reads(data: bytes) -> int:
        try:
            return int(read(data))
        except BaseException:
            # Not by libFuzzer, whose orderly exit may crash other threads.
            broken = FOLDER / f"broken-{hashlib.sha1(data).hexdigest()}"
            broken.write_bytes(data)
            traceback.print_exc()
            print(f"{target.__name__} is broken by the input in {broken}", file=sys.stderr, flush=True)
            os._exit(1)

    atheris.Setup([sys.argv[0], str(corpus), *options, *limits], reads)
    atheris.Fuzz()


def quoted(word: str) -> str:
    """A word of a dictionary in libFuzzer's format."""
    return '"' + "".join(f"\\x{byte:02x}" for byte in word.encode()) + '"'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=TARGETS, help="this one; repeatable [all]")
    parser.add_argument("--runs", type=int, default=0, help="inputs; 0 for as many as the seconds allow")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    began = time.monotonic()
    chosen = arguments.target or list(TARGETS)
    whole = sum(TARGETS[name].SHARE for name in chosen)
    inputs: dict[str, int] = {}
    failed = 0
    for name in chosen:
        part = TARGETS[name].SHARE / whole
        before = counts()["inputs"]
        with tempfile.TemporaryDirectory() as folder:
            child = os.fork()
            if child == 0:
                runs, seconds = int(arguments.runs * part), max(1, int(arguments.seconds * part))
                fuzz(TARGETS[name], runs, seconds, arguments.seed, Path(folder))
            _, status = os.waitpid(child, 0)
        failed = os.waitstatus_to_exitcode(status)
        inputs[name] = counts()["inputs"] - before
        if failed:
            break
    print(json.dumps({**counts(), "of_each": inputs, "seconds": round(time.monotonic() - began, 1)}))
    sys.exit(failed)


def counts() -> dict[str, int]:
    return dict(zip(fuzz_inputs.COUNTED, fuzz_inputs.counters, strict=True))


if __name__ == "__main__":
    main()
