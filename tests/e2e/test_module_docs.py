"""The examples of docs/engine-author.md about modules run unchanged. The one about CUDA graphs runs in tests/gpu."""

from __future__ import annotations

import re

from memsaver_server.client import Client

from .serving import ROOT, Example, python_blocks

PAGE = "docs/engine-author.md"
NUMBER = re.compile(r"-?\d+\.\d+")


def test_a_loop_over_a_module() -> None:
    with Example(next(block for block in python_blocks(PAGE) if "input(" in block)) as example:
        address = example.read_address()

        def run() -> float:
            found = NUMBER.search(example.ask(""))
            assert found is not None
            return float(found.group())

        first = run()
        with Client(address) as client:
            (weights,) = [tag for tag in client.occupation().tags if tag.tag == "weights"]
            assert client.release().released_bytes >= weights.bytes > 4 * 3_000_000 * 4
            client.resume()
        assert run() == first
        example.say("q")
        example.end()


def test_memory_that_the_first_call_creates_is_shown_as_it_is_tested() -> None:
    (example,) = [block for block in python_blocks(PAGE) if "engine.workspace(" in block and "attach(" in block]
    tested = (ROOT / "tests/service/module_examples.py").read_text()
    assert "\n".join("    " + line for line in example.splitlines()) in tested
