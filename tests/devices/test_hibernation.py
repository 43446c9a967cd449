"""Hibernation on any kind of device."""

from __future__ import annotations

import pytest

from tests.programs import output_of


def test_a_shrunk_tag_keeps_its_size(device: str) -> None:
    told = output_of(
        f"""
        import torch, memsaver_core as ms
        with ms.region("kv_cache", chunk_bytes=4 << 20):
            cache = torch.ones(16 << 20, dtype=torch.uint8, device={device!r})
        ms.resize("kv_cache", fraction=0.5)
        ms.release(hibernate=True)
        try:
            ms.resize("kv_cache", fraction=1)
        except ms.UnsupportedError as error:
            print(error)
        ms.resume()
        (tag,) = (tag for tag in ms.status().tags if tag.tag == "kv_cache")
        print(tag.resident_bytes, tag.shrunk_bytes)
        print(ms.resize("kv_cache", fraction=1).resumed_bytes, int(cache.sum()))
        """
    )
    refused = "this process is hibernated; resume it before a resize"
    assert told.splitlines() == [refused, f"{8 << 20} {8 << 20}", f"{8 << 20} 0"]


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
