"""The README's examples run unchanged."""

from __future__ import annotations

from memsaver_server.client import Client
from tests.programs import output_of

from .serving import Example, environment, memsaver, python_blocks, serving


def test_the_engine_example() -> None:
    code = next(block for block in python_blocks("README.md") if "attach(" in block)
    with Example(code) as example:
        float(example.read_line())
        address = example.read_address()
        released = memsaver("release", "--url", address)
        assert released.returncode == 0, released.stderr
        assert "64" in released.stdout
        with Client(address) as client:
            (weights,) = [tag for tag in client.occupation().tags if tag.tag == "weights"]
            assert weights.released_bytes >= 4096 * 4096 * 4
            assert client.resume().resumed_bytes == weights.released_bytes
        example.say("")
        example.end()


def test_the_client_example() -> None:
    example = next(block for block in python_blocks("README.md") if "Client(" in block)
    with serving() as server:
        said = output_of(example.replace("http://127.0.0.1:30000", server.url), inherited=environment())
        assert int(said) > 0
