"""Real SGLang on a GPU: what must survive a release besides weights and cache, one server for each feature."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing.reductions import reduce_tensor

from memsaver_core import compat
from tests.engine_server import COUNTS
from tests.gpu import engines
from tests.gpu.children import two_devices, with_new_nccl
from tests.programs import output_of
from tests.sglang import checkpoint
from tests.sglang.server import ARGUMENTS, Server

DENSE = {**checkpoint.QWEN, **checkpoint.WIDE}
EXPERTS = {**checkpoint.MIXTRAL, **checkpoint.WIDE}
WINDOWS = {**checkpoint.MELLUM, **checkpoint.WIDE, "head_dim": 128}
#: SGLang refuses triton as the backend of this model by name alone, since its attention may begin later.
STATES = {**checkpoint.LFM2, **checkpoint.WIDE, "head_dim": 128, "layer_types": ["full_attention", "conv"]}
BACKENDS = (
    *("--attention-backend", "fa3", "--prefill-attention-backend", "triton"),
    *("--decode-attention-backend", "triton"),
)
#: A cache of the rotary embedding of its own.
DRAFT = {**DENSE, "max_position_embeddings": 8192}
EAGLE = {**DENSE, **checkpoint.EAGLE}
NO_PREFILL_GRAPHS = ("--cuda-graph-backend-prefill", "disabled")
#: The memory of graphs is released, too.
RELEASED = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}
SPECULATION = (
    "--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4",
)  # fmt: skip


#: What SGLang and its libraries may hold in torch's allocator outside of every tag.
OUTSIDE_OF_TAGS = 32 << 20

MISSING = engines.missing("SGLang", "sglang", "sglang.srt.plugins")
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING or "-")]


class GpuServer(Server):
    arguments = (
        *ARGUMENTS, "--attention-backend", "triton", "--mem-fraction-static", "0.25", "--chunked-prefill-size", "512",
        "--cuda-graph-max-bs-decode", "2", "--cuda-graph-max-bs-prefill", "512", "--enable-weights-cpu-backup",
    )  # fmt: skip
    environment: ClassVar[dict[str, str]] = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(compat.PATH), os.environ.get("PYTHONPATH", "")]),
        "TRANSFORMERS_OFFLINE": "1",
    }

    def answer(self, length: int, **fields: Any) -> tuple[list[int], int]:
        """Return the tokens that follow a prompt of ``length``, and how many steps a draft model saved."""
        prompt = [(7919 * (place + 3)) % 1000 + 10 for place in range(length)]
        whole = self.request(24, prompt, **fields)
        assert whole.status_code == 200, whole.text
        return whole.json()["output_ids"], whole.json()["meta_info"].get("spec_verify_ct", 0)

    def answers(self, **fields: Any) -> list[tuple[list[int], int]]:
        """One prompt at a time and none from the prefix cache: only then greedy tokens are repeatable."""
        answers = []
        for length in (7, 300):
            self.own("/flush_cache")
            answers.append(self.answer(length, **fields))
        return answers


Start = Callable[..., GpuServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    servers: list[GpuServer] = []

    def one(*arguments: str, config: dict[str, Any] = DENSE, **environment: str) -> GpuServer:
        model = checkpoint.write(tmp_path / "model", config=config)
        servers.append(GpuServer(model, tmp_path / f"log-{len(servers)}", *arguments, **environment))
        servers[-1].wait_until_up()
        return servers[-1]

    yield one
    for server in servers:
        server.close()


def check(server: GpuServer, answers: Callable[[], Any] | None = None) -> None:
    answers = answers or server.answers
    server.check_cycles(answers)
    if bytes_of("cuda_graph", server):  # else the memory of graphs stays
        check_all_is_tagged(server)
    expected = answers()
    server.service("/release_memory_occupation", {"hibernate": True})
    server.service("/resume_memory_occupation")
    assert answers() == expected


def check_all_is_tagged(server: GpuServer) -> None:
    """After a release, torch's allocator holds nearly nothing: the rest is the process's context and libraries."""
    server.service("/release_memory_occupation")
    sources = server.get("/memory_occupation").json()["devices"][0]["sources"]
    server.service("/resume_memory_occupation")
    assert sum(each["bytes"] for each in sources if each["kind"] in ("torch", "cache")) <= OUTSIDE_OF_TAGS, sources


def bytes_of(tag: str, server: GpuServer) -> int:
    tags = server.get("/memory_occupation").json()["tags"]
    return sum(each["bytes"] for each in tags if each["tag"] == tag)


def test_prefill_graphs(start: Start) -> None:
    """SGLang's default."""
    server = start()
    assert bytes_of("cuda_graph", server) == 0
    check(server)


def test_prefill_graphs_whose_memory_is_released(start: Start) -> None:
    server = start(**RELEASED)
    assert bytes_of("cuda_graph", server) > 0
    check(server)


def test_prefill_graphs_alone(start: Start) -> None:
    server = start("--cuda-graph-backend-decode", "disabled", **RELEASED)
    assert bytes_of("cuda_graph", server) > 0
    check(server)


def test_lora(start: Start, tmp_path: Path) -> None:
    """SGLang's pool has room for eight adapters."""
    adapter = checkpoint.write_adapter(tmp_path / "adapter", DENSE, rank=64)
    server = start("--enable-lora", "--lora-paths", f"one={adapter}", *NO_PREFILL_GRAPHS, **RELEASED)
    assert server.answers() != server.answers(lora_path="one")
    assert bytes_of("runtime", server) > 7 * (adapter / "adapter_model.safetensors").stat().st_size
    check(server, lambda: (server.answers(), server.answers(lora_path="one")))


def test_hierarchical_cache(start: Start) -> None:
    """Prefixes that only host memory has are forgotten with the cache's content, and copied to the device otherwise."""
    server = start(
        "--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-write-policy", "write_through",
        "--max-total-tokens", "2048", *NO_PREFILL_GRAPHS, **RELEASED,
    )  # fmt: skip
    prompts = [[(7919 * (place + 3) * seed) % 1000 + 10 for place in range(600)] for seed in range(1, 6)]

    def answers() -> list[list[int]]:
        server.own("/flush_cache")
        return [server.generate(8, prompt) for prompt in [*prompts, prompts[0]]]

    def cached() -> int:
        return int(server.request(1, prompts[0]).json()["meta_info"]["cached_tokens"])

    server.check_cycles(answers)
    assert cached() > 0
    server.service("/release_memory_occupation", {"restore": {"kv_cache": "host"}})
    server.service("/resume_memory_occupation")
    assert cached() > 0
    server.own("/release_memory_occupation")
    server.own("/resume_memory_occupation")
    assert cached() == 0
    refused = server.service("/release_memory_occupation", {"hibernate": True}, status=409)
    assert "--enable-hierarchical-cache" in refused["error"]["message"]


@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE", "NGRAM"])
def test_speculation(start: Start, tmp_path: Path, algorithm: str) -> None:
    """The steps that a draft model saves tell whether it is intact; the tokens are the same with any."""
    arguments = ["--speculative-algorithm", algorithm, *SPECULATION]
    if algorithm == "NGRAM":
        arguments = ["--speculative-algorithm", algorithm, "--speculative-num-draft-tokens", "4"]
    else:
        draft = checkpoint.write(tmp_path / "draft", config=DRAFT if algorithm == "STANDALONE" else EAGLE)
        arguments += ["--speculative-draft-model-path", str(draft)]
    if algorithm == "EAGLE":  # in a server these are too small to be seen
        output_of("from tests.sglang import draft_buffers; draft_buffers.check('cuda')", by_itself=True)
    server = start(*arguments, *NO_PREFILL_GRAPHS, **RELEASED)
    expected = server.answers()
    if algorithm == "NGRAM":  # it learns from each answer
        check(server, lambda: [tokens for tokens, _ in server.answers()])
        return
    check(server)
    if algorithm == "STANDALONE":  # SGLang's update writes the same weights into both models, and no buffers
        server.service("/release_memory_occupation", {"restore": {"weights": "discard"}})
        server.service("/resume_memory_occupation")
        server.write_weights()
        assert server.answers() == expected


#: A cache of 64 MiB a tensor, 131,072 tokens, in small pieces.
ELASTIC = ("--max-total-tokens", str(131_072), "--enable-metrics")
#: With another first token it is another prompt.
LONG = [(7919 * (place + 3)) % 1000 + 10 for place in range(3900)]
PIECES = {"MEMSAVER_KV_CACHE_PIECE": "2MiB", **RELEASED}


def cache(server: GpuServer) -> dict[str, Any]:
    answer: dict[str, Any] = server.get("/kv_cache").raise_for_status().json()
    return answer


def used(server: GpuServer) -> int:
    """Return what its processes use of the devices, by NVML: other tests may run beside this one."""
    return sum(each["process_bytes"] for each in server.get("/memory_occupation").json()["devices"])


def fill(server: GpuServer) -> None:
    """Have prefixes in more than half of the cache, so that requests that begin now are behind."""
    server.own("/flush_cache")
    for number in range(18):
        server.generate(1, [10 + number, *LONG])


def check_sizes(server: GpuServer, answers: Callable[[], Any], check: Callable[..., None] = check) -> None:
    """Of the cache; ``answers()`` are the same at each, and requests end whatever happens to their pages."""
    expected, whole = answers(), cache(server)
    large: list[int] = []
    for _ in range(3):
        before = used(server)
        half = server.service("/kv_cache", {"fraction": 0.5})["kv_cache"]
        assert half["bytes"] == pytest.approx(whole["bytes"] / 2, rel=0.01)
        assert before - (small := used(server)) >= whole["bytes"] * 0.45
        assert answers() == expected
        server.service("/kv_cache", {"fraction": 1})
        large.append(used(server))
        assert large[-1] - small >= whole["bytes"] * 0.45
        assert answers() == expected
    assert max(large) - large[0] <= 2 << 20
    for requests in (2, 24):  # in graphs, and in none
        fill(server)
        running = server.in_background(requests, 400)
        assert cache(server)["smallest_bytes"] > whole["bytes"] / 2
        server.service("/kv_cache", {"fraction": 0.5, "timeout_s": 120})
        assert all(len(each.result(120)) == 400 for each in running)
        server.service("/kv_cache", {"fraction": 1})
        fill(server)
        running = server.in_background(requests, 1500)
        for fraction in (0.3, 0.9, 0.2, 1.0, 0.25):
            server.service("/kv_cache", {"fraction": fraction, "mode": "preempt", "timeout_s": 0})
        assert all(len(each.result(180)) == 1500 for each in running)
        fill(server)  # after a flush, and what does not fit
        assert answers() == expected
        server.service("/kv_cache", {"fraction": 1})
    assert {**cache(server), **COUNTS} == {**whole, **COUNTS}  # prefixes went with the pages
    server.service("/kv_cache", {"fraction": 0.5})
    check(server, answers)
    assert cache(server)["bytes"] == pytest.approx(whole["bytes"] / 2, rel=0.01)
    server.service("/kv_cache", {"fraction": 1})
    assert answers() == expected


@pytest.mark.parametrize("arguments", [(), ("--page-size", "16"), ("--kv-cache-dtype", "fp8_e5m2")])
def test_a_cache_of_any_size(start: Start, arguments: tuple[str, ...]) -> None:
    """With graphs of both kinds."""
    server = start(*ELASTIC, *arguments, **PIECES)
    check_sizes(server, server.answers)


def test_a_hierarchical_cache_of_any_size(start: Start) -> None:
    """A prefix whose pages went is copied from host memory when it comes again."""
    hierarchical = ("--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-write-policy", "write_through")
    server = start(*ELASTIC, *hierarchical, **PIECES)
    check_sizes(server, server.answers, GpuServer.check_cycles)
    fill(server)
    prompt = [10, *LONG]
    before = server.generate(8, prompt)
    server.service("/kv_cache", {"fraction": 0.2})
    again = server.request(8, prompt).json()
    assert again["output_ids"] == before
    assert again["meta_info"]["cached_tokens"] > 3800
    server.service("/kv_cache", {"fraction": 1})


@pytest.mark.parametrize("config", [WINDOWS, STATES], ids=["sliding windows", "states"])
def test_layers_with_other_pages_and_a_cache_of_any_size(start: Start, config: dict[str, Any]) -> None:
    """The pages of the others go."""
    backends = BACKENDS if config is STATES else ()
    server = start(*ELASTIC, *backends, "--max-mamba-cache-size", "64", config=config, **PIECES)
    check_sizes(server, server.answers)


def test_a_draft_model_with_a_cache_of_any_size(start: Start, tmp_path: Path) -> None:
    """It has the same pages: half of its cache goes, too."""
    draft = checkpoint.write(tmp_path / "draft", config=EAGLE)
    arguments = ("--speculative-algorithm", "EAGLE", *SPECULATION, "--speculative-draft-model-path", str(draft))
    server = start(*ELASTIC, *arguments, *NO_PREFILL_GRAPHS, **PIECES)
    page_bytes = 3 * 2 * 2 * 128 * 2  # of three layers, keys and values, two heads of 128 numbers, bfloat16
    assert cache(server)["page_bytes"] == page_bytes * cache(server)["page_tokens"]
    check_sizes(server, server.answers)


@two_devices
@with_new_nccl
def test_two_ranks_with_a_cache_of_any_size(start: Start) -> None:
    server = start("--tp", "2", "--disable-custom-all-reduce", *ELASTIC, *NO_PREFILL_GRAPHS, **PIECES)
    check_sizes(server, server.answers)


def test_updates_while_released(start: Start, tmp_path: Path) -> None:
    server = start(*NO_PREFILL_GRAPHS, **RELEASED)
    server.check_updates_while_released(checkpoint.write(tmp_path / "other", seed=8, config=DENSE))


def write_by_ipc(server: GpuServer, folder: Path) -> None:
    """Have SGLang copy the weights of its checkpoint from this process's device memory, as from checkpoint-engine's
    parameter server: by the messages that ``checkpoint_engine.worker`` 0.4.2 awaits."""
    zmq = pytest.importorskip("zmq")
    pytest.importorskip("checkpoint_engine.worker")
    weights = load_file(server.model / "model.safetensors", device="cuda")
    offsets = itertools.accumulate((each.nbytes for each in weights.values()), initial=0)
    buffer = torch.cat([each.flatten().view(torch.uint8) for each in weights.values()])
    parts = [
        {"name": name, "shape": each.shape, "dtype": each.dtype, "offset": offset}
        for (name, each), offset in zip(weights.items(), offsets, strict=False)
    ]
    handles = {f"GPU-{torch.cuda.get_device_properties(0).uuid}": f"ipc://{folder}/weights"}
    with zmq.Context() as context, context.socket(zmq.REQ) as socket, ThreadPoolExecutor(1) as pool, server.writing():
        socket.rcvtimeo, socket.linger = 60_000, 0
        socket.bind(*handles.values())
        asked = pool.submit(server.own, "/update_weights_from_ipc", {"zmq_handles": handles})
        for message in (reduce_tensor(buffer), parts, None, None):
            socket.send_pyobj(message)
            assert socket.recv() == b""
        asked.result()


def test_weights_from_memory_of_another_process(start: Start, tmp_path: Path) -> None:
    """Into an engine whose cache is still released."""
    server = start(*NO_PREFILL_GRAPHS, **RELEASED)
    expected = server.answers()
    server.service("/release_memory_occupation", {"restore": {"weights": "discard"}})
    server.service("/resume_memory_occupation", {"tags": ["weights"]})
    write_by_ipc(server, tmp_path)
    server.service("/resume_memory_occupation")
    assert server.answers() == expected


def test_two_replicas_on_one_device(start: Start) -> None:
    one, other = start(*NO_PREFILL_GRAPHS), start(*NO_PREFILL_GRAPHS)
    expected = one.answers()
    assert other.answers() == expected
    for asleep, awake in ((one, other), (other, one)):
        asleep.service("/release_memory_occupation", {"hibernate": True})
        assert awake.answers() == expected
        asleep.service("/resume_memory_occupation")
        assert asleep.answers() == expected


def test_experts(start: Start) -> None:
    check(start(*NO_PREFILL_GRAPHS, config=EXPERTS, **RELEASED))


def test_quantized_weights(start: Start) -> None:
    """Quantized by SGLang as it loads them."""
    check(start("--quantization", "fp8", *NO_PREFILL_GRAPHS, **RELEASED))


@two_devices
@with_new_nccl
def test_two_ranks(start: Start) -> None:
    """By NCCL alone, whose memory goes with the rest."""
    check(start("--tp", "2", "--disable-custom-all-reduce", *NO_PREFILL_GRAPHS, **RELEASED))


@two_devices
@with_new_nccl
def test_two_ranks_with_a_custom_all_reduce(start: Start) -> None:
    """SGLang's default. What it shares stays, and no checkpoint covers it."""
    server = start("--tp", "2", *NO_PREFILL_GRAPHS, TORCH_SYMM_MEM_DISABLE_MULTICAST="1", **RELEASED)
    server.check_cycles(server.answers)
    refused = server.service("/release_memory_occupation", {"hibernate": True}, status=409)
    assert "--disable-custom-all-reduce" in refused["error"]["message"]
