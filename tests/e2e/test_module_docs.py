"""The examples of docs/module.md run as they stand. That of CUDA graphs does so in tests/gpu."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from memsaver_server.client import Client

from .serving import ADDRESS, environment

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"-?\d+\.\d+")


def blocks() -> list[str]:
    found: list[str] = BLOCK.findall((ROOT / "docs/module.md").read_text())
    return found


def test_a_loop_over_a_module() -> None:
    example = next(block for block in blocks() if "input(" in block)
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", example],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        address = ADDRESS.search(process.stdout.readline())
        assert address is not None

        def run() -> float:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            found = NUMBER.search(process.stdout.readline())
            assert found is not None
            return float(found.group())

        first = run()
        with Client(address.group()) as client:
            (weights,) = [tag for tag in client.occupation().tags if tag.tag == "weights"]
            assert client.release().released_bytes >= weights.bytes > 4 * 3_000_000 * 4
            client.resume()
        assert run() == first
        process.stdin.write("q\n")
        process.stdin.flush()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_memory_that_the_first_call_creates_is_shown_as_it_is_tested() -> None:
    (example,) = [block for block in blocks() if "engine.workspace(" in block and "attach(" in block]
    tested = (ROOT / "tests/service/module_examples.py").read_text()
    assert "\n".join("    " + line for line in example.splitlines()) in tested
