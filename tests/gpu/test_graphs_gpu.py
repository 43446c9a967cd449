"""CUDA graphs over released and resumed memory. All tests share one saver, so each has tags of its own."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Iterator

import pytest
import torch

import memsaver_core as ms
from memsaver_core import process
from tests.programs import run_python

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SIZE = 1024


@pytest.fixture
def tag() -> Iterator[str]:
    """A prefix of tags that no other test uses; memory left under them is resumed at the end."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    yield name
    gc.collect()
    torch.cuda.synchronize()
    ms.resume([each for each in process.saver().known_tags() if each.startswith(name)] or None)
    torch.cuda.empty_cache()


class Attention:
    """A step like an engine's: weights, a cache that the graph reads, static input and output."""

    def __init__(self, tag: str) -> None:
        self.tags = [f"{tag}-w", f"{tag}-kv", f"{tag}-g"]
        with ms.region(self.tags[0], restore="host"):
            self.weights = torch.randn(SIZE, SIZE, device="cuda") / 32
        with ms.region(self.tags[1], restore="zero"):
            self.cache = torch.randn(SIZE, SIZE, device="cuda") / 32
        with ms.region(self.tags[2], restore="host"):
            self.given = torch.randn(64, SIZE, device="cuda")
        self.stream = torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            self.step()
        torch.cuda.synchronize()

    def step(self, times: int = 1) -> torch.Tensor:
        state = self.given
        for _ in range(times):
            state = torch.tanh((state @ self.weights) @ self.cache)
        return state

    def capture(self, pool: ms.GraphPool, times: int = 1) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with ms.graph(graph, pool=pool, stream=self.stream):
            out = self.step(times)
        return graph, out

    def pool(self) -> ms.GraphPool:
        return ms.GraphPool(self.tags[2], restore="host")


def replayed(graph: torch.cuda.CUDAGraph, out: torch.Tensor) -> torch.Tensor:
    out.fill_(2)  # a value that no step yields
    graph.replay()
    return out.cpu()


def bytes_of(tag: str) -> int:
    return next(each.bytes for each in ms.status().tags if each.tag == tag)


@pytest.mark.parametrize("policy", ["zero", "discard"])
@pytest.mark.guards("replaying a graph failed after its memory was discarded", "undefined KV cache pages produced NaN")
def test_weights_and_graph_come_back_where_the_cache_is_given_up(tag: str, policy: str) -> None:
    """The graph replays over a cache that came back as zeros, and correctly over one that was written again."""
    engine = Attention(tag)
    graph, out = engine.capture(engine.pool())
    expected, cache = replayed(graph, out), engine.cache.cpu()
    for _ in range(3):
        ms.release(engine.tags, restore={engine.tags[1]: policy})
        ms.resume(engine.tags)
        if policy == "zero":
            assert not replayed(graph, out).any()
        engine.cache.copy_(cache)
        assert torch.equal(replayed(graph, out), expected)


@pytest.mark.guards("replaying a graph failed after its memory was discarded", "releasing a graph freed nothing")
def test_graphs_that_share_a_pool_replay_after_release(tag: str) -> None:
    """All graphs of one pool replay correctly, in any order, and the pool's bytes were freed, as measured."""
    engine = Attention(tag)
    pool = engine.pool()
    graphs = [engine.capture(pool, times) for times in (4, 3, 2, 1)]
    expected = [replayed(*each) for each in graphs]
    cache = engine.cache.cpu()
    assert all(process.saver().owns(out.data_ptr()) for _, out in graphs)
    for round_ in range(3):
        before = ms.read_devices()[0].used_bytes
        report = ms.release(engine.tags)
        assert before - ms.read_devices()[0].used_bytes >= report.released_bytes - 16 * MIB
        assert bytes_of(engine.tags[2]) > 0
        ms.resume(engine.tags)
        engine.cache.copy_(cache)
        order = [3, 1, 0, 2] if round_ % 2 else [0, 1, 2, 3]
        assert all(torch.equal(replayed(*graphs[i]), expected[i]) for i in order)


@pytest.mark.guards("replaying a graph failed after its memory was discarded")
def test_capture_after_resume(tag: str) -> None:
    """A graph captured after a resume, into an earlier graph's pool: both replay correctly."""
    engine = Attention(tag)
    pool = engine.pool()
    graphs = [engine.capture(pool, 3)]
    expected = [replayed(*graphs[0])]
    cache = engine.cache.cpu()
    for times in (2, 1, 4):
        ms.release(engine.tags)
        ms.resume(engine.tags)
        engine.cache.copy_(cache)
        graphs.append(engine.capture(pool, times))
        expected.append(engine.step(times).cpu())
        for each, right in zip(graphs, expected, strict=True):
            assert torch.allclose(replayed(*each), right, rtol=1e-3, atol=1e-5)
    assert torch.equal(replayed(*graphs[0]), expected[0])


@pytest.mark.guards("freeing a released tensor released its memory twice", "the process aborted at exit")
def test_graph_destroyed_while_released(tag: str) -> None:
    """torch frees the graph's memory while it is released; the pool's other graph is correct, and nothing remains
    under the tag."""
    engine = Attention(tag)
    pool = engine.pool()
    given = engine.given.cpu()
    doomed, doomed_out = engine.capture(pool, 4)
    graph, out = engine.capture(pool)
    expected, cache = replayed(graph, out), engine.cache.cpu()
    ms.release(engine.tags)
    del doomed, doomed_out
    gc.collect()
    torch.cuda.empty_cache()
    ms.resume(engine.tags)
    engine.cache.copy_(cache)
    assert torch.equal(replayed(graph, out), expected)
    ms.release(engine.tags)
    del graph, out, pool
    gc.collect()
    torch.cuda.empty_cache()
    assert bytes_of(engine.tags[2]) == 2 * MIB  # torch's segment that holds the static input
    ms.resume(engine.tags)
    assert torch.equal(engine.given.cpu(), given)


@pytest.mark.parametrize("last", ["exit", "destroy"])
@pytest.mark.guards("the process aborted at exit")
def test_exit_while_released_with_graphs_alive(last: str) -> None:
    """With several graphs of one pool released, the interpreter exits before or after they are destroyed."""
    result = run_python(
        f"""
        import gc, torch, memsaver_core as ms
        with ms.region("weights"):
            weights = torch.randn(1024, 1024, device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            weights @ weights
        torch.cuda.synchronize()
        pool = ms.GraphPool()
        graphs = []
        for times in (3, 2, 1):
            graph = torch.cuda.CUDAGraph()
            with ms.graph(graph, pool=pool, stream=stream):
                out = weights
                for _ in range(times):
                    out = out @ weights
            graphs.append((graph, out))
            graph.replay()
        torch.cuda.synchronize()
        ms.release()
        if {last!r} == "destroy":
            del graph, out
            graphs.clear()
            gc.collect()
        print("end", flush=True)
        """
    )
    assert (result.returncode, result.stdout.strip()) == (0, "end"), result.stderr
    assert "terminate" not in result.stderr
    assert "memsaver: warning" not in result.stderr
