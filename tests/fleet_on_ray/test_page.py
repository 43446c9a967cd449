"""The page for RL engineers on Ray runs as it stands, in a cluster of its own."""

from __future__ import annotations

from tests.e2e.serving import environment, python_blocks
from tests.programs import output_of


def test_the_page_runs_as_it_stands() -> None:
    page = next(block for block in python_blocks("docs/fleet.md") if "ray.init(" in block)
    printed = output_of(page, inherited=environment({"RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1"}))
    assert "released on 2 engines" in printed
    assert "resumed on 2 engines ['resident', 'resident']" in printed
