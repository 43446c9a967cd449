"""The names of SGLang that memsaver relies on, in the source of the installed version."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from memsaver_server.integrations.sglang import buffers, engine, page_limit, plugin
from tests.programs import output_of

from .server import ENVIRONMENT, source


def test_names_of_the_scheduler() -> None:
    scheduler = source("managers/scheduler.py")
    for name in {path.partition(".")[0] for path in engine.NAMES}:
        assert re.search(rf"\bself\.{name}(: [^=]*)? = |def {name}\(|\) = self\.{name}\b", scheduler), name


def test_names_of_requests() -> None:
    messages = source("managers/io_struct.py")
    for name in engine.MESSAGES:
        assert f"class {name}(" in messages, name
    prompt = messages.partition("class TokenizedGenerateReqInput(")[2].partition("\nclass ")[0]
    for name in ("input_embeds", "input_ids", "input_text", "logprob_start_len", "mm_inputs", "return_logprob"):
        assert f"    {name}: " in prompt, name
    for name in ("sampling_params", "stream", "token_ids_logprob", "token_type_ids", "top_logprobs_num"):
        assert f"    {name}: " in prompt, name


def test_names_of_the_tokenizer_manager() -> None:
    assert "self.model_update_lock = RWLock()" in source("managers/tokenizer_manager.py")
    lock = source("utils/aio_rwlock.py")
    assert "self._rwlock.acquire_writer()" in lock
    assert "async def release_writer(self)" in lock
    control = source("managers/tokenizer_control_mixin.py")
    assert '("get_internal_state", GetInternalStateReqOutput)' in control
    for name in plugin.CALLS:
        assert f"await self.{name}_communicator(obj)" in control


def test_names_of_prefill_graphs() -> None:
    path, _, name = plugin.BACKEND.removeprefix("sglang.srt.").rpartition(".")
    graphs = source(path.replace(".", "/") + ".py")
    assert f"class {name}(" in graphs
    for text in ("enable_memory_saver: bool = False", "self._device_module = ", "if self._pool is None:"):
        assert text in graphs
    assert "def get_or_create_global_graph_memory_pool(device_module" in source("model_executor/runner_utils/pool.py")


def test_names_of_what_allocates_outside_of_regions() -> None:
    for hook in buffers.hooks():
        path, owner, name = hook.removeprefix("sglang.srt.").rsplit(".", 2)
        text = source(path.replace(".", "/") + ".py")
        assert f"class {owner}" in text, hook
        assert f"    def {name}(" in text, hook
    attention = "layers/attention/"
    assert "class AttentionBackend(" in source(attention + "base_attn_backend.py")
    for backend in ("flashinfer", "triton", "flashattention"):
        assert "    def init_cuda_graph_state(" in source(f"{attention}{backend}_backend.py")
    assert 'get_buffer(\n            "flashinfer_workspace",' in source(attention + "flashinfer_backend.py")


def test_buffers_of_draft_models_have_a_tag() -> None:
    output_of("from tests.sglang import draft_buffers; draft_buffers.check('cpu')", **ENVIRONMENT, by_itself=True)


def test_names_of_the_kv_cache() -> None:
    scheduler = source("managers/scheduler.py")
    for name in page_limit.OBSERVERS:
        assert f"self.{name} = " in scheduler
        assert "    max_total_num_tokens: int\n" in source(f"managers/scheduler_components/{name}.py")
    for name in ("continue_generation", "pause_generation"):
        assert f"def {name}(self, recv_req: " in scheduler
    assert "            self.max_req_len," in scheduler
    assert "self.full_tokens_per_layer = " in scheduler
    allocators = [source(f"mem_cache/allocator/{each}.py") for each in ("base", "token", "paged", "swa")]
    assert "self.full_attn_allocator = " in allocators[-1]
    assert "self.full_kv_pool = " in source("mem_cache/swa_memory_pool.py")
    for name in (*page_limit.ALLOCATORS, page_limit.WINDOWS):
        assert any(f"class {name}(" in each for each in allocators)
    prefixes = source("mem_cache/base_prefix_cache.py")
    assert "num_tokens: int = 0" in prefixes
    assert sum(f"def {name}(" in prefixes for name in page_limit.COMPUTED) == 1
    assert "def get_alloc_reserve_per_decode(" in source("mem_cache/allocation_sizing.py")
    pools = source("mem_cache/memory_pool.py")
    assert all(f"self.{name} = " in pools for name in page_limit.BUFFERS)
    metrics = source("observability/metrics_collector.py")
    assert all(f"self.{name} = Gauge(" in metrics for name in ("max_total_num_tokens", "num_pages"))


def test_names_of_several_receivers_and_of_transfers() -> None:
    scheduler = source("managers/scheduler.py")
    for name in engine.QUEUES:
        assert f"self.{name} = " in scheduler, name
    for path, name in (
        ("disaggregation/decode.py", "def release_memory_occupation(self)"),
        ("disaggregation/decode.py", "def resume_memory_occupation(self)"),
        ("disaggregation/mooncake/conn.py", "def deregister_buffer_to_engine(self)"),
        ("disaggregation/prefill.py", "def release_memory_occupation(self)"),
        ("disaggregation/prefill.py", "def resume_memory_occupation(self)"),
        ("managers/scheduler_components/dp_attn.py", "len(offload_tags) == 0 and ("),
        ("managers/scheduler_components/request_receiver.py", "    recv_from_tokenizer: "),
        ("managers/scheduler_components/request_receiver.py", engine.LOCAL),
        ("managers/scheduler_components/weight_updater.py", "offload_tags"),
    ):
        assert name in source(path), (path, name)
    found = find_spec("sglang.srt.disaggregation")
    assert found is not None
    receivers = [each for path in found.submodule_search_locations or () for each in Path(path).rglob("*receiver.py")]
    assert any("self.waiting_list: " in each.read_text() for each in receivers)


def test_names_of_draft_models() -> None:
    assert "def draft_runners(self)" in source("speculative/base_spec_worker.py")


def test_names_of_what_ranks_share() -> None:
    for path, name in (
        ("distributed/device_communicators/custom_all_reduce.py", "self.buffer_ptrs = "),
        ("distributed/device_communicators/pymscclpp.py", "self.comm = "),
        ("distributed/device_communicators/pynccl_allocator.py", "\n_mem_pool = "),
        ("distributed/device_communicators/torch_symm_mem.py", "self.buffer = "),
        ("distributed/parallel_state.py", "self.ca_comm: "),
        ("distributed/parallel_state.py", "self.pymscclpp_comm: "),
        ("distributed/parallel_state.py", "self.torch_symm_mem_comm: "),
        ("layers/flashinfer_comm_fusion.py", '"flashinfer_fusion_'),
        ("layers/flashinfer_comm_fusion.py", "self.workspace = "),
        ("layers/moe/utils.py", "def get_moe_a2a_backend("),
        ("runtime_context.py", "def get_resources("),
    ):
        assert name in source(path), (path, name)
    module, _, function = plugin.CONFIGURE.removeprefix("sglang.srt.").rpartition(".")
    assert f"def {function}(server_args" in source(module.replace(".", "/") + ".py")
