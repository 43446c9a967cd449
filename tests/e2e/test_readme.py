"""The README's examples run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from memsaver_server.client import Client

from .serving import ADDRESS, environment, memsaver, serving

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks() -> list[str]:
    found: list[str] = BLOCK.findall((ROOT / "README.md").read_text())
    return found


def test_an_engine_of_ones_own_in_ten_lines() -> None:
    example = next(block for block in blocks() if "attach(" in block)
    lines = [line for line in example.splitlines() if line.strip() and not line.startswith(("import ", "from "))]
    assert len(lines) <= 10
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
        float(process.stdout.readline())
        address = ADDRESS.search(process.stdout.readline())
        assert address is not None
        released = memsaver("release", "--url", address.group())
        assert released.returncode == 0, released.stderr
        assert "64" in released.stdout
        with Client(address.group()) as client:
            (weights,) = [tag for tag in client.occupation().tags if tag.tag == "weights"]
            assert weights.released_bytes >= 4096 * 4096 * 4
            assert client.resume().resumed_bytes == weights.released_bytes
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_the_client_example() -> None:
    example = next(block for block in blocks() if "Client(" in block)
    with serving() as server:
        ran = subprocess.run(
            [sys.executable, "-c", example.replace("http://127.0.0.1:30000", server.url)],
            capture_output=True,
            text=True,
            env=environment(),
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        assert int(ran.stdout) > 0
