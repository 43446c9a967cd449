"""The service in an SGLang scheduler's process, with a stand-in for the scheduler, through real sockets."""

from __future__ import annotations

import gc
import re
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

import memsaver_core as ms
from memsaver_core.compat import torch_memory_saver
from memsaver_core.contract.errors import ConfigurationError
from memsaver_core.hibernation import preconditions
from memsaver_server import Settings
from memsaver_server.engine import Engine
from memsaver_server.integrations.adapter.plugin import address
from memsaver_server.integrations.sglang import engine, plugin
from memsaver_server.integrations.sglang.engine import SglangEngine, SglangScheduler
from tests.waiting import wait_until

from . import sglang_standin as standin
from .test_no_threads import no_threads

PROMPT = [5, 17, 60, 2]


class Serving:
    """A running scheduler, its clients' answers, and a client of the service."""

    def __init__(self, scheduler: standin.Scheduler, **settings: Any) -> None:
        self.scheduler = scheduler
        self.attachment = plugin.attach(scheduler, settings=Settings(**settings))
        self.http = httpx.Client(base_url=self.attachment.url, timeout=600, verify=False)
        self.loop = threading.Thread(target=scheduler.run_event_loop, daemon=True)
        self.loop.start()
        self.answers: dict[str, Any] = {}

    def send(self, tokens: list[int] = PROMPT, *, wanted: int = 8, rid: str = "") -> str:
        request = standin.TokenizedGenerateReqInput(rid or uuid.uuid4().hex, tokens, wanted)
        self.scheduler.received.put(request)
        return request.rid

    def answer(self, rid: str) -> Any:
        """The result of a request."""
        while rid not in self.answers:
            name, output = self.scheduler.ipc_channels.send_to_tokenizer.answers.get(timeout=600)
            self.answers[name] = output
        return self.answers.pop(rid)

    def generate(self, tokens: list[int] = PROMPT) -> list[int]:
        output: list[int] = self.answer(self.send(tokens)).output_ids
        return output

    def call(self, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
        answer = self.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        content: dict[str, Any] = answer.json()
        return content

    def close(self) -> None:
        self.scheduler.stalled = False
        self.http.post("/resume_memory_occupation")
        self.http.close()
        self.attachment.close()
        self.scheduler.gracefully_exit = True
        self.loop.join(600)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> type[standin.Scheduler]:
    monkeypatch.setattr(preconditions, "_checks", [*preconditions._checks])  # a scheduler registers its own, for good
    return standin.install(monkeypatch, torch_memory_saver)


@pytest.fixture
def serve(make: type[standin.Scheduler]) -> Iterator[Callable[..., Serving]]:
    servings: list[Serving] = []

    def start(*, weights_cpu_backup: bool = True, **settings: Any) -> Serving:
        servings.append(Serving(make(enable_weights_cpu_backup=weights_cpu_backup), **settings))
        return servings[-1]

    yield start
    while servings:
        servings.pop().close()
    gc.collect()  # else the weights of the next test are of two schedulers, with a backup and without


def waiting(serving: Serving, count: int) -> None:
    """Return once ``count`` requests run."""

    def run() -> bool:
        assert serving.loop.is_alive()
        return len(serving.scheduler.running_batch.reqs) == count

    wait_until(run)


def test_it_is_an_engine(make: type[standin.Scheduler]) -> None:
    assert isinstance(SglangEngine(SglangScheduler(make())), Engine)


@pytest.mark.guards("the prefix cache pointed to discarded pages")
def test_release_and_resume(serve: Callable[..., Serving]) -> None:
    """The tokens are the same afterwards, and no prefix is read from a cache without pages."""
    serving = serve()
    expected = serving.generate()
    assert serving.scheduler.tree_cache.prefixes
    for _ in range(2):
        serving.call("/release_memory_occupation")
        assert all(tag.released_bytes for tag in ms.status().tags if tag.tag in ("weights", "kv_cache") and tag.bytes)
        refused = serving.answer(serving.send())
        assert refused.finished_reason["status_code"] == 503
        assert "released" in refused.finished_reason["message"]
        assert serving.http.get("/readyz").status_code == 503
        assert serving.http.get("/livez").status_code == 200
        serving.call("/resume_memory_occupation")
        assert not serving.scheduler.tree_cache.prefixes
        assert serving.generate() == expected


def test_a_release_waits_for_requests_in_flight(serve: Callable[..., Serving]) -> None:
    serving = serve()
    expected = serving.generate()
    serving.scheduler.stalled = True
    rid = serving.send()
    waiting(serving, 1)
    held_up = serving.call("/release_memory_occupation", 504, timeout_s=0.1)
    assert held_up["error"]["pending"] == [rid]
    assert all(not tag.released_bytes for tag in ms.status().tags)
    serving.scheduler.stalled = False
    assert serving.answer(rid).output_ids == expected
    serving.call("/release_memory_occupation", timeout_s=0)
    serving.call("/resume_memory_occupation")
    assert serving.generate() == expected


def test_a_hierarchical_cache_is_not_hibernated(
    make: type[standin.Scheduler], serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preconditions, "_checks", [])
    initialize = make.__init__

    def with_cache(scheduler: standin.Scheduler, **options: Any) -> None:
        initialize(scheduler, **options)
        scheduler.server_args.enable_hierarchical_cache = True

    monkeypatch.setattr(make, "__init__", with_cache)
    serving = serve()
    expected = serving.generate()
    refused = serving.call("/release_memory_occupation", 409, hibernate=True)
    assert "--enable-hierarchical-cache" in refused["error"]["message"]
    serving.call("/release_memory_occupation")
    serving.call("/resume_memory_occupation")
    assert serving.generate() == expected


def test_a_release_waits_for_copies_of_the_hierarchical_cache(serve: Callable[..., Serving]) -> None:
    """SGLang looks at them in each iteration, which in a hibernated process would not end."""
    serving = serve()
    expected = serving.generate()
    controller = SimpleNamespace(ack_write_queue=["a copy"], ack_load_queue=[])
    serving.scheduler.tree_cache.cache_controller = controller
    serving.call("/release_memory_occupation", 504, timeout_s=0.1)
    assert all(not tag.released_bytes for tag in ms.status().tags)
    serving.call("/pause_generation", mode="retract")  # then it does not look at them
    serving.call("/release_memory_occupation", timeout_s=10)
    serving.call("/resume_memory_occupation")
    serving.call("/continue_generation")
    controller.ack_write_queue.clear()
    serving.call("/release_memory_occupation")
    serving.call("/resume_memory_occupation")
    assert serving.generate() == expected


@pytest.mark.guards("nobody could cancel an operation that waited")
def test_a_release_that_is_cancelled(serve: Callable[..., Serving]) -> None:
    """The request in flight continues, with its tokens."""
    serving = serve()
    expected = serving.generate()
    serving.scheduler.stalled = True
    rid = serving.send()
    waiting(serving, 1)
    started = serving.call("/release_memory_occupation", 202, **{"timeout_s": 3600, "async": True})
    wait_until(lambda: serving.http.get(started["location"]).json()["phase"] == "drain")
    assert serving.http.delete(started["location"]).json()["status"] == "cancelled"
    serving.scheduler.stalled = False
    assert serving.answer(rid).output_ids == expected
    assert serving.generate() == expected


@pytest.mark.guards("an abort waited behind the drain of another release")
def test_an_abort_overtakes_the_drain_of_another_release(serve: Callable[..., Serving]) -> None:
    serving = serve()
    serving.scheduler.stalled = True
    rid = serving.send()
    waiting(serving, 1)
    weak = serving.call("/release_memory_occupation", 202, **{"timeout_s": 3600, "async": True})
    wait_until(lambda: serving.http.get(weak["location"]).json()["phase"] == "drain")
    strong = serving.call("/release_memory_occupation", mode="abort")
    assert (strong["operation_id"], strong["state"]) == (weak["operation_id"], "released")
    assert serving.answer(rid).to_finish
    serving.call("/resume_memory_occupation")


def test_a_release_that_aborts(serve: Callable[..., Serving]) -> None:
    serving = serve()
    serving.scheduler.stalled = True
    rid = serving.send()
    waiting(serving, 1)
    serving.call("/release_memory_occupation", mode="abort")
    assert serving.answer(rid).to_finish
    serving.call("/resume_memory_occupation")


def test_a_release_that_aborts_requests_paused_in_place(serve: Callable[..., Serving]) -> None:
    """A paused scheduler would not end them."""
    serving = serve()
    serving.scheduler.stalled = True
    rid = serving.send()
    waiting(serving, 1)
    serving.scheduler.received.put(standin.PauseGenerationReqInput("in_place"))
    wait_until(lambda: serving.scheduler._engine_paused)
    serving.call("/release_memory_occupation", mode="abort", timeout_s=10)
    assert isinstance(serving.answer(rid), standin.AbortReq)
    serving.call("/resume_memory_occupation")
    assert serving.scheduler._engine_paused


def test_a_pause_of_an_engine_that_the_service_has_paused(serve: Callable[..., Serving]) -> None:
    """It lasts until its caller continues, as without the release."""
    serving = serve()
    expected = serving.generate()
    serving.scheduler.stalled = True
    rid = serving.send()
    waiting(serving, 1)
    serving.call("/release_memory_occupation", mode="keep")
    serving.scheduler.received.put(standin.PauseGenerationReqInput("retract"))
    serving.scheduler.received.put(standin.FlushCacheReqInput(rid="flush"))
    assert serving.answer("flush").success
    serving.scheduler.stalled = False
    serving.call("/resume_memory_occupation")
    assert serving.call("/flush_cache")
    assert serving.scheduler._engine_paused
    serving.scheduler.received.put(standin.ContinueGenerationReqInput())
    assert serving.answer(rid).output_ids == expected


@pytest.mark.parametrize("keep_cache", [True, False])
def test_a_release_that_keeps_requests(serve: Callable[..., Serving], keep_cache: bool) -> None:
    """Running requests continue after the resume, and get the tokens that they would have got."""
    serving = serve()
    expected = serving.generate()
    serving.scheduler.stalled = True
    rid = serving.send()
    waiting(serving, 1)
    restore = {"kv_cache": "host"} if keep_cache else {}
    serving.call("/release_memory_occupation", mode="keep", restore=restore)
    assert serving.scheduler._engine_paused
    serving.scheduler.stalled = False
    serving.call("/resume_memory_occupation")
    assert serving.answer(rid).output_ids == expected
    assert serving.generate() == expected


def test_a_verification_prompt_that_does_not_end(
    serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests that made room for it continue."""
    monkeypatch.setattr(engine, "VERIFICATION_S", 0.1)
    monkeypatch.setattr(engine.base, "ITERATION_S", 0.1)
    serving = serve()
    expected = serving.generate()
    monkeypatch.setattr(serving.scheduler, "abort_request", lambda _request: None)
    serving.scheduler.stalled = True
    rid = serving.send()
    waiting(serving, 1)
    failed = serving.call("/release_memory_occupation", 500, mode="keep", verify="token")
    assert "verification prompt was not computed" in failed["message"]
    serving.scheduler.stalled = False
    assert serving.answer(rid).output_ids == expected
    assert serving.generate() == expected


def test_requests_that_wait_for_the_memory(serve: Callable[..., Serving]) -> None:
    serving = serve(while_released="queue", queue_limit=3)
    expected = serving.generate()
    serving.call("/release_memory_occupation")
    first = serving.send()
    batch = [standin.TokenizedGenerateReqInput(uuid.uuid4().hex, PROMPT) for _ in range(2)]
    serving.scheduler.received.put(standin.BatchTokenizedGenerateReqInput(batch))
    too_many = serving.send()
    assert serving.answer(too_many).finished_reason["status_code"] == 503
    serving.scheduler.received.put(standin.AbortReq(rid=batch[1].rid))
    assert serving.answer(batch[1].rid).finished_reason is None
    serving.call("/resume_memory_occupation")
    assert serving.answer(first).output_ids == expected
    assert serving.answer(batch[0].rid).output_ids == expected


@pytest.mark.guards("health probes confused a sleeping engine with a dead one")
def test_health_checks_by_generation_are_answered_while_released(serve: Callable[..., Serving]) -> None:
    """So that a sleeping worker is not taken for a dead one."""
    serving = serve()
    serving.call("/release_memory_occupation")
    serving.send(rid="HEALTH_CHECK_1")
    assert serving.answer("") is None
    serving.call("/resume_memory_occupation")


@pytest.mark.parametrize("resumed_first", [["weights"], []])
@pytest.mark.guards("generation answered from memory whose content was discarded")
def test_weights_without_a_backup(serve: Callable[..., Serving], resumed_first: list[str]) -> None:
    """Nothing is generated before SGLang's update, which rewrites the weights but never the buffers beside them."""
    serving = serve(weights_cpu_backup=False)
    expected = serving.generate()
    model = serving.scheduler.tp_worker.model_runner.model
    weights = model.table.detach().clone()
    serving.call("/release_memory_occupation")
    serving.call("/release_memory_occupation")  # the kept buffers survive a release of nothing
    serving.call("/resume_memory_occupation", tags=resumed_first)
    if not resumed_first:
        refused = serving.answer(serving.send())
        assert refused.finished_reason["status_code"] == 503
        assert "content of weights" in refused.finished_reason["message"]
        assert serving.http.get("/readyz").status_code == 503
    serving.scheduler.received.put(standin.UpdateWeightsFromTensorReqInput(weights))
    wait_until(lambda: all(tag["content"] == "ok" for tag in serving.http.get("/memory_occupation").json()["tags"]))
    serving.call("/resume_memory_occupation")
    assert float(model.scale) == 3.0
    assert serving.generate() == expected


def test_an_update_of_weights_that_are_released(serve: Callable[..., Serving]) -> None:
    """The resume brings in what it wrote in host memory."""
    serving = serve()
    expected, model = serving.generate(), serving.scheduler.tp_worker.model_runner.model
    new = model.table.detach().roll(1)

    def update(rid: str) -> Any:
        serving.scheduler.received.put(standin.UpdateWeightsFromTensorReqInput(new, rid=rid))
        return serving.answer(rid)

    serving.call("/release_memory_occupation")
    assert update("first").success
    serving.call("/resume_memory_occupation")
    assert torch.equal(model.table, new)
    assert serving.generate() != expected
    serving.call("/release_memory_occupation")
    model.post_load_weights = lambda: None  # of a model that computes something from its weights
    refused = update("second")
    assert (refused.success, "derived weights" in refused.message) == (False, True)
    serving.call("/resume_memory_occupation")


def test_an_update_with_a_beginning_and_an_end(serve: Callable[..., Serving]) -> None:
    """Its parts are not the whole."""
    serving = serve(weights_cpu_backup=False)
    expected = serving.generate()
    weights = serving.scheduler.tp_worker.model_runner.model.table.detach().clone()
    serving.call("/release_memory_occupation")
    serving.scheduler.received.put(standin.BeginWeightUpdateReqInput(rid="early"))
    assert "resume it first" in serving.answer("early").message
    serving.call("/resume_memory_occupation")
    for part in (
        standin.BeginWeightUpdateReqInput(rid="begin"),
        standin.UpdateWeightsFromTensorReqInput(weights, rid="part"),
    ):
        serving.scheduler.received.put(part)
        assert serving.answer(part.rid).success
        assert "content of weights" in serving.answer(serving.send()).finished_reason["message"]
    serving.scheduler.received.put(standin.EndWeightUpdateReqInput(rid="end"))
    assert serving.answer("end").success
    wait_until(lambda: serving.http.get("/readyz").status_code == 200)
    assert serving.generate() == expected


def test_an_update_may_name_what_it_writes(serve: Callable[..., Serving]) -> None:
    """A resume by the service may demand that, also of weights that were written while they were released."""
    serving = serve()
    new = serving.scheduler.tp_worker.model_runner.model.table.detach().roll(1)
    assert update(serving, new, "step-1") == "step-1"
    assert update(serving, new) is None
    assert update(serving, new, "step-2") == "step-2"
    serving.scheduler.update_error = "no"
    assert update(serving, new, "step-3") is None
    serving.scheduler.update_error = ""
    assert serving.call("/release_memory_occupation")["weights_version"] is None
    assert update(serving, new, "step-4") == "step-4"
    serving.scheduler.update_error = "no"
    assert update(serving, new, "step-5") == "step-4"
    assert "'step-4'" in serving.call("/resume_memory_occupation", 409, weights_version="step-5")["message"]
    assert serving.call("/resume_memory_occupation", weights_version="step-4")["weights_version"] == "step-4"


@pytest.mark.parametrize("asleep", [False, True])
def test_an_update_of_several_parts_has_its_version_at_its_end(serve: Callable[..., Serving], asleep: bool) -> None:
    serving = serve()
    new = serving.scheduler.tp_worker.model_runner.model.table.detach().roll(1)
    assert update(serving, new, "step-1") == "step-1"
    if asleep:
        serving.call("/release_memory_occupation")
    for parts, held in (
        (["step-2", None], "step-2"),
        ([None], None),
        (["step-3", "step-4"], "step-4"),
        (["step-5", "fails", None], None),
        (["step-6", BEGIN], None),
    ):
        assert update(serving, BEGIN) is None
        for part in parts:
            serving.scheduler.update_error = "no" if part == "fails" else ""
            assert update(serving, BEGIN if part is BEGIN else new, part) is None
        assert update(serving, END) == held


BEGIN, END = standin.BeginWeightUpdateReqInput("begin"), standin.EndWeightUpdateReqInput("end")


def update(serving: Serving, content: Any, version: Any = None) -> str | None:
    """Send ``content``: all weights, or what begins or ends an update; return the version after it."""
    request = content
    if isinstance(content, torch.Tensor):
        request = standin.UpdateWeightsFromTensorReqInput(content, "part", version)
    serving.scheduler.received.put(request)
    serving.answer(request.rid)
    held: str | None = serving.http.get("/memory_occupation").json()["weights_version"]
    return held


@pytest.mark.parametrize("worker", ["draft_model_runner", "draft_runners"])
def test_the_buffers_of_a_draft_model(make: type[standin.Scheduler], worker: str) -> None:
    """No weight update writes them either."""
    scheduler = make(enable_weights_cpu_backup=False)
    with scheduler.memory_saver_adapter.region("weights"):
        runner = SimpleNamespace(model=standin.Model(1))
    inner = SimpleNamespace(draft_runners=[runner])
    scheduler.draft_worker = SimpleNamespace(
        **({worker: runner} if worker == "draft_model_runner" else {"draft_worker": inner})
    )
    work = SglangScheduler(scheduler)
    work.save_buffers()
    runner.model.scale.zero_()
    work.repair(["weights"])
    assert float(runner.model.scale) == 3.0


def test_a_call_for_which_there_is_no_thread(serve: Callable[..., Serving]) -> None:
    """It is answered, and the scheduler goes on."""
    serving = serve()
    expected = serving.generate()
    with no_threads():
        serving.scheduler.received.put(standin.ReleaseMemoryOccupationReqInput())
        _, output = serving.scheduler.ipc_channels.send_to_tokenizer.answers.get(timeout=600)
    assert output.rid.startswith("503 nothing was done")
    assert serving.generate() == expected


def test_flush_and_pause(serve: Callable[..., Serving]) -> None:
    serving = serve()
    expected = serving.generate()
    serving.call("/flush_cache")
    assert not serving.scheduler.tree_cache.prefixes
    serving.scheduler.stalled = True
    rid = serving.send()
    waiting(serving, 1)
    assert serving.call("/flush_cache", 504)["error"]["pending"] == [rid]
    serving.call("/pause_generation", mode="retract")
    serving.call("/flush_cache")
    serving.call("/release_memory_occupation")
    serving.call("/flush_cache")
    serving.call("/resume_memory_occupation")
    serving.scheduler.stalled = False
    assert serving.scheduler._engine_paused
    serving.call("/continue_generation")
    assert serving.answer(rid).output_ids == expected


def test_a_flush_of_a_hibernated_engine(serve: Callable[..., Serving]) -> None:
    """SGLang's flush calls the device, which blocks: the prefixes are forgotten after the wake-up."""
    serving = serve()
    expected = serving.generate()
    serving.call("/release_memory_occupation", hibernate=True, restore={"kv_cache": "host"})
    serving.call("/flush_cache")
    serving.scheduler.received.put(standin.FlushCacheReqInput(rid="flush"))
    assert serving.answer("flush").success
    assert serving.scheduler.tree_cache.prefixes
    serving.call("/resume_memory_occupation")
    assert not serving.scheduler.tree_cache.prefixes
    assert serving.generate() == expected


@pytest.mark.parametrize("paused", [True, False])
def test_a_flush_while_a_request_is_about_to_leave(serve: Callable[..., Serving], paused: bool) -> None:
    """SGLang answers a pause before its scheduler has received it, and a request before its scheduler is idle."""
    serving = serve()
    expected = serving.generate()
    serving.scheduler.stalled = True
    rid = serving.send()
    waiting(serving, 1)

    def both(scheduler: standin.Scheduler) -> None:
        if paused:
            scheduler.received.put(standin.PauseGenerationReqInput("retract"))
        scheduler.received.put(standin.FlushCacheReqInput(rid="flush"))
        scheduler.stalled = False

    serving.scheduler.received.put(standin.Run(0, both))
    assert serving.answer("flush").success
    assert not serving.scheduler.tree_cache.prefixes
    serving.scheduler.received.put(standin.ContinueGenerationReqInput())
    assert serving.answer(rid).output_ids == expected


@pytest.mark.guards(
    "health probes confused a sleeping engine with a dead one",
    "an operation waited forever, and nothing said why",
)
def test_a_scheduler_that_ended(serve: Callable[..., Serving]) -> None:
    """A dead engine is distinguished from a sleeping one, and no caller waits for it."""
    serving = serve()
    serving.generate()
    serving.scheduler.gracefully_exit = True
    serving.loop.join(600)
    assert serving.http.get("/livez").status_code == 503
    assert "has stopped" in serving.call("/release_memory_occupation", 500)["message"]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"enable_memory_saver": False}, "--enable-memory-saver"),
        ({"dp_size": 4}, "MEMSAVER_SGLANG_REPLICAS is not set"),
    ],
)
def test_schedulers_that_cannot_be_served(make: type[standin.Scheduler], wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        plugin.attach(make(**wrong))


def test_other_schedulers_that_cannot_be_served(make: type[standin.Scheduler], monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make()
    prefill(scheduler, backend="nixl", kv_manager=object())
    with pytest.raises(ConfigurationError, match="nixl cannot let go of the cache's memory"):
        plugin.attach(scheduler)
    scheduler = make(tp_size=2)
    scheduler.server_args.nnodes, scheduler.server_args.dist_init_addr = 2, "192.0.2.1:50000"
    with pytest.raises(ConfigurationError, match="on several hosts; set MEMSAVER_API_KEY"):
        plugin.attach(scheduler)
    monkeypatch.setenv("MEMSAVER_API_KEY", "a key of both hosts")
    SglangScheduler(scheduler).check()
    monkeypatch.delenv("MEMSAVER_API_KEY")
    scheduler = make(dp_size=2, attn_dp_size=2)
    del scheduler.ps  # as from 0.5.21 on, where these are two options
    context = SimpleNamespace(get_parallel=lambda: scheduler.request_receiver.ps)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="either --dp or --attn-dp-size"):
        plugin.attach(scheduler)
    monkeypatch.delitem(sys.modules, "sglang.srt.runtime_context")
    for option, value in (("enable_dp_attention_local_control_broadcast", True), ("elastic_ep_backend", "nixl")):
        scheduler = make()
        setattr(scheduler.server_args, option, value)
        with pytest.raises(ConfigurationError, match=option.replace("_", "-")):
            plugin.attach(scheduler)
    scheduler = make()
    scheduler.server_args.weight_cache_mode = "client"
    with pytest.raises(ConfigurationError, match="--weight-cache-mode off"):
        plugin.attach(scheduler)
    scheduler = make()
    scheduler.rust_server = object()  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match="Rust server"):
        plugin.attach(scheduler)
    standin.install(monkeypatch, uuid)  # some other module under that name
    with pytest.raises(ConfigurationError, match="another torch_memory_saver"):
        plugin.attach(scheduler)


class Transfers:
    """SGLang's queue of requests whose pages are sent to another engine, and the manager of these transfers."""

    def __init__(self, kv_manager: object = None) -> None:
        self.queue: list[standin.Req] = []
        self.kv_manager = kv_manager or SimpleNamespace(deregister_buffer_to_engine=None)
        self.calls: list[str] = []

    def release_memory_occupation(self) -> None:
        assert not self.queue
        self.calls.append("release")

    def resume_memory_occupation(self) -> None:
        assert not any(tag.released_bytes for tag in ms.status().tags)
        self.calls.append("resume")


def prefill(scheduler: Any, backend: str = "mooncake", kv_manager: object = None) -> Transfers:
    scheduler.disaggregation_mode = standin.DisaggregationMode.PREFILL
    scheduler.server_args.disaggregation_transfer_backend = backend
    transfers = scheduler.disagg_prefill_bootstrap_queue = Transfers(kv_manager)
    idle = scheduler.is_fully_idle
    scheduler.is_fully_idle = lambda **named: idle(**named) and not transfers.queue
    return transfers


def test_a_side_of_a_disaggregated_engine(make: type[standin.Scheduler]) -> None:
    """Its transfers end first; then their memory is let go of, until all of it is back."""
    scheduler = make()
    transfers = prefill(scheduler)
    serving = Serving(scheduler)
    try:
        expected = serving.generate()
        transfers.queue.append(standin.Req("transferred", PROMPT, 1))
        held_up = serving.call("/release_memory_occupation", 504, timeout_s=0.1)
        assert held_up["error"]["pending"] == ["transferred"]
        assert not transfers.calls
        transfers.queue.clear()
        serving.call("/release_memory_occupation")
        assert transfers.calls == ["release"]
        serving.call("/resume_memory_occupation", tags=["weights"])
        assert transfers.calls == ["release"]
        serving.call("/resume_memory_occupation")
        assert serving.generate() == expected
        assert transfers.calls == ["release", "resume"]
        for body, why in (
            ({"mode": "keep"}, "another engine's, too"),
            ({"hibernate": True}, "mooncake holds memory of the device"),
            ({"verify": "token"}, "computes no request by itself"),
        ):
            assert why in serving.call("/release_memory_occupation", 409, **body)["message"]
        assert "write its pages" in serving.call("/kv_cache", 409, fraction=0.5)["message"]
    finally:
        serving.close()


def test_requests_that_wait_for_another_engine_s_encoder(make: type[standin.Scheduler]) -> None:
    """``--language-only``: they are in flight, though SGLang's scheduler does not count them."""
    scheduler = make()
    waiting_list = [SimpleNamespace(rid="an image")]
    scheduler.mm_receiver = SimpleNamespace(waiting_list=waiting_list)  # type: ignore[assignment]
    serving = Serving(scheduler)
    try:
        held_up = serving.call("/release_memory_occupation", 504, timeout_s=0.1)
        assert held_up["error"]["pending"] == ["an image"]
        waiting_list.clear()
        serving.call("/release_memory_occupation")
    finally:
        serving.close()


def test_only_the_first_rank_is_attached(make: type[standin.Scheduler]) -> None:
    with pytest.raises(ConfigurationError, match=r"rank 1: call follow\(\)"):
        plugin.attach(make(tp_size=2, tp_rank=1))


def test_a_version_that_lacks_a_name(make: type[standin.Scheduler], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported at the start, not when the name is needed."""
    scheduler = make()
    scheduler.draft_worker = SimpleNamespace()
    monkeypatch.delattr(standin.Tree, "reset")
    monkeypatch.delattr(standin.Tokenizer, "send_output")
    monkeypatch.delattr(sys.modules["sglang.srt.managers.io_struct"], "UpdateWeightFromDiskReqInput")
    lacks = (
        "Scheduler.ipc_channels.send_to_tokenizer.send_output, Scheduler.tree_cache.reset, "
        "Scheduler.draft_worker.clear_cache_pool, io_struct.UpdateWeightFromDiskReqInput"
    )
    with pytest.raises(ConfigurationError, match=re.escape(lacks)):
        plugin.attach(scheduler)


def test_attached_by_the_plugin(make: type[standin.Scheduler], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original = make.run_event_loop
    for value in ("", "0"):
        monkeypatch.setenv("MEMSAVER_SGLANG", value)
        plugin.register()
        assert make.run_event_loop is original
    path = tmp_path / "engine.sock"
    monkeypatch.setenv("MEMSAVER_SGLANG", str(path))
    plugin.register()
    scheduler = make()
    loop = threading.Thread(target=scheduler.run_event_loop, daemon=True)
    loop.start()
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://engine") as http:

        def answers() -> bool:
            assert loop.is_alive()
            try:
                assert http.get("/livez").status_code == 200
            except httpx.ConnectError:  # it does not listen yet
                return False
            return True

        wait_until(answers)
    scheduler.gracefully_exit = True
    loop.join(600)
    assert not path.exists()


def test_addresses() -> None:
    assert address("127.0.0.1:30100", "MEMSAVER_SGLANG") == {"host": "127.0.0.1", "port": 30100}
    assert address("[::1]:1", "MEMSAVER_SGLANG") == {"host": "::1", "port": 1}
    assert address("/run/memsaver.sock", "MEMSAVER_SGLANG") == {"uds": "/run/memsaver.sock"}
    with pytest.raises(ConfigurationError, match="HOST:PORT"):
        address("1", "MEMSAVER_SGLANG")
