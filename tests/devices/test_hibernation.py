"""Hibernation on any kind of device."""

from __future__ import annotations

import pytest

from tests.programs import output_of


@pytest.mark.parametrize("tags", [None, ["kv_cache"]])
@pytest.mark.guards("the process aborted at exit")
def test_clean_exit_while_hibernated(device: str, tags: list[str] | None) -> None:
    """On a GPU with graphs, too."""
    told = output_of(
        f"""
        import torch, memsaver_core as ms
        with ms.region("weights"):
            weights = torch.ones(1 << 20, device={device!r})
        if {device!r} == "cuda":
            with ms.region("kv_cache"):
                cache = torch.ones(1 << 28, device="cuda")
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            with ms.graph(graph, stream=stream):
                out = weights * 2
            graph.replay()
        ms.release({tags!r}, hibernate=True)
        print("end", flush=True)
        """,
        TESTS_END_WHOLE="1",
    )
    assert told == "end\n"
