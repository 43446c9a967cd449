"""The README's examples run unchanged, and what it installs exists."""

from __future__ import annotations

import re
from importlib.metadata import metadata

import pytest

from memsaver_server.client import Client
from tests.programs import output_of

from .serving import ROOT, Example, environment, memsaver, python_blocks, serving


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
    example = next(block for block in python_blocks("docs/reference.md") if "Client(" in block)
    with serving() as server:
        said = output_of(example.replace("http://127.0.0.1:30000", server.url), inherited=environment())
        assert int(said) > 0


@pytest.mark.parametrize("page", ["README.md", "docs/reference.md"])
def test_the_extras_to_install_exist(page: str) -> None:
    """They are named as a checkout has them: before a release, no index has memsaver."""
    installed = re.findall(r"pip install '(\S+)\[(\w+)\]'", (ROOT / page).read_text())
    assert (
        {"server", "engine", "cli"}
        <= {extra for _, extra in installed}
        <= set(metadata("memsaver").get_all("Provides-Extra"))
    )
    assert {what for what, _ in installed} == {"."}
