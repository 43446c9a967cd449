"""The reference engine on several ranks, each a process, through the service: one memory, one model, one fate."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
from transformers import AutoModelForCausalLM

from memsaver_core import hibernation, nvml
from memsaver_core.contract.errors import OutOfHostMemoryError
from memsaver_core.lending import Lending
from memsaver_server import Attachment, attach
from memsaver_server.reference import ranks
from memsaver_server.reference.builtin_model import small_checkpoint
from memsaver_server.reference.engine import TransformersEngine
from memsaver_server.reference.ranks import LIMITS_S, RanksFailedError
from memsaver_server.reference.weights import fill_random
from tests import forks
from tests.e2e.serving import FORKED_RANKS, environment, serving
from tests.waiting import wait_until

TEXT = "a prompt that is longer than one chunk, so that a prefix of it is kept; "
PROMPT = {"text": TEXT, "sampling_params": {"max_new_tokens": 24}}
LONG = {"text": TEXT, "sampling_params": {"max_new_tokens": 60}}
SIZES: dict[str, Any] = {"kv_cache_bytes": 16 << 20, "max_len": 256, "batch_sizes": (1, 2)}
#: Four key-value heads, so that four ranks can share them.
SHAPE = {
    "model_type": "qwen2",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}

TWO_RANKS = ("--tensor-parallel", "2", "--kv-cache-bytes", "16MiB", "--max-len", "256")

#: Makes an engine without room for a request.
SMALL_CACHE = """
from memsaver_server.reference import ranks
from memsaver_server.reference.engine import TransformersEngine
from tests import forks

ranks.subprocess = forks
TransformersEngine(tensor_parallel=2, kv_cache_bytes=1)
"""
#: Makes an engine whose rank 1 is stopped while it loads.
FROZEN_LOAD = """
import fcntl, os, signal, sys
from memsaver_server.reference import ranks
from memsaver_server.reference.engine import TransformersEngine
from tests import forks

ranks.subprocess = forks
ranks.LIMITS_S["load"], ranks.END_S = 5.0, 2.0
make_runner, join = ranks.RankGroup.make_runner, ranks._join

def make_with_frozen(group):
    def join_frozen(*arguments):
        if sys.argv[1] == "while it loads":
            join(*arguments)
        os.kill(group._processes[1].pid, signal.SIGSTOP)
        if sys.argv[1] == "before it joins":  # a rank that is frozen may have the lock of the file where they meet
            meeting = open(group._folder + "/meeting")
            fcntl.flock(meeting, fcntl.LOCK_EX)
            join(*arguments)

    ranks._join = join_frozen
    return make_runner(group)

ranks.RankGroup.make_runner = make_with_frozen
TransformersEngine(tensor_parallel=2, kv_cache_bytes=16 << 20, max_len=256, batch_sizes=(1, 2))
"""


class Served:
    """An engine of several ranks, served; and what an engine of one rank with the same weights answers to PROMPT."""

    expected: list[int]

    def __init__(self, ranks: int, *, compared: bool = True, **options: Any) -> None:
        if compared:
            whole = TransformersEngine(**options, **SIZES)
            self.expected = asyncio.run(whole.generate(PROMPT))["output_ids"]
            whole.close()
        self.engine = TransformersEngine(tensor_parallel=ranks, **options, **SIZES)
        self.attachment: Attachment = attach(self.engine)
        self.http = httpx.Client(base_url=self.attachment.url, timeout=600, verify=False)

    def post(self, path: str, body: object = None, status: int = 200) -> dict[str, Any]:
        response = self.http.post(path, json=body)
        assert response.status_code == status, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def tokens(self) -> list[int]:
        tokens: list[int] = self.post("/generate", PROMPT)["output_ids"]
        return tokens

    def used_bytes(self) -> int:
        devices = self.http.get("/memory_occupation").json()["devices"]
        return sum(device["used_bytes"] for device in devices)

    def pids(self) -> list[int]:
        """The processes of the ranks; the first is this one."""
        return [rank["pid"] for rank in self.http.get("/memory_occupation").json()["ranks"]]

    def close(self) -> None:
        self.http.close()
        self.attachment.close()
        self.engine.close()


@pytest.fixture(autouse=True, scope="module")
def _ranks_are_forks() -> Iterator[None]:
    """Of engines in this process. A rank's end may be noticed late on a busy machine, and explains what failed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "subprocess", forks)
        patch.setattr(ranks, "_EXPLAIN_S", 600.0)
        patch.setattr("memsaver_server.ranks.group.EXPLAIN_S", 600.0)
        yield


@pytest.fixture(scope="module")
def two() -> Iterator[Served]:
    served = Served(2)
    yield served
    served.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    shape = tmp_path_factory.mktemp("shape") / "config.json"
    shape.write_text(json.dumps(SHAPE))
    served = Served(4, random_weights=shape, seed=3)
    yield served
    served.close()


def test_the_cache_of_several_ranks_is_not_resized(two: Served) -> None:
    refused = two.http.post("/kv_cache", json={"fraction": 0.5})
    assert (refused.status_code, "cannot change the size of its KV cache" in refused.text) == (409, True)


def test_two_ranks_compute_what_one_does(two: Served) -> None:
    """Each holds its part of the weights, and its heads of the KV cache."""
    assert two.tokens() == two.expected
    assert two.engine.describe()["ranks"] == 2
    assert len(set(two.pids())) == 2
    assert two.pids()[0] == os.getpid()


@pytest.mark.parametrize("body", [{}, {"hibernate": True}])
def test_all_ranks_are_released_together(two: Served, body: dict[str, object]) -> None:
    resident = sum(tag["resident_bytes"] for tag in two.http.get("/memory_occupation").json()["tags"])
    wait_until(lambda: two.used_bytes() >= resident)  # a reading may be of a moment ago
    full = two.used_bytes()
    answer = two.post("/release_memory_occupation", body)
    assert answer["released_bytes"] > 2 * SIZES["kv_cache_bytes"] * 9 // 10
    wait_until(lambda: full - two.used_bytes() >= answer["released_bytes"])
    asleep = two.http.get("/memory_occupation").json()
    assert asleep["state"] == "released"
    assert asleep["hibernated"] == ("hibernate" in body)
    assert all(tag["resident_bytes"] == 0 for tag in asleep["tags"])
    assert {rank["state"] for rank in asleep["ranks"]} == {"released"}
    assert two.http.get("/livez").status_code == 200
    two.post("/resume_memory_occupation")
    assert two.http.get("/readyz").status_code == 200
    assert two.tokens() == two.expected


def test_each_rank_holds_the_disk_space_of_what_is_prepared(two: Served) -> None:
    """Nobody held it: all ranks counted on the same space, and other processes took it before the commit."""

    def files(pid: int) -> set[tuple[int, int]]:
        """Those without a name that take space."""
        found = set()
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                if "(deleted)" in os.readlink(each) and each.stat().st_blocks:
                    found.add((each.stat().st_dev, each.stat().st_ino))
        return found

    before = {pid: files(pid) for pid in two.pids()}
    asked = {"restore": {"weights": "file"}, "prepare": True, "lease_s": 600}
    operation_id = two.post("/release_memory_occupation", asked)["operation_id"]
    assert all(files(pid) - known for pid, known in before.items())
    two.post(f"/operations/{operation_id}/abort")
    assert not any(files(pid) - known for pid, known in before.items())
    operation_id = two.post("/release_memory_occupation", asked)["operation_id"]
    assert two.post(f"/operations/{operation_id}/commit")["state"] == "released"
    two.post("/resume_memory_occupation")
    assert two.tokens() == two.expected


def test_nvml_is_not_asked_while_rank_0_is_hibernated(two: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls wait until the process wakes; rank 0 is in the service's process."""
    away: list[bool] = []
    monkeypatch.setattr(nvml, "read_memory", lambda *_: away.append(hibernation.is_away()))
    two.post("/release_memory_occupation", {"hibernate": True})
    assert two.http.get("/memory_occupation").json()["hibernated"]
    two.post("/resume_memory_occupation")
    assert away
    assert not any(away)


def test_frozen_requests_go_on(two: Served) -> None:
    """All ranks take the same steps before and after. A verification meanwhile does not disturb them."""
    expected = two.post("/generate", LONG)["output_ids"]
    frozen = two.engine.submit(LONG)
    two.post("/release_memory_occupation", {"mode": "keep", "verify": "token"})
    assert not frozen.done()
    two.post("/resume_memory_occupation", {"verify": "token"})
    assert frozen.result(600).output == expected


def test_updates_reach_every_rank(two: Served, tmp_path: Path) -> None:
    """Tensors are whole in a request; one that no rank can use is written to none."""
    model: Any = AutoModelForCausalLM.from_pretrained(small_checkpoint())
    fill_random(model, 99)
    model.save_pretrained(tmp_path)
    prompt = [list(TEXT.encode())]
    theirs = model.generate(model.lm_head.weight.new_tensor(prompt).long(), max_new_tokens=24, do_sample=False)
    trained = theirs[0, len(prompt[0]) :].tolist()
    two.post("/update_weights_from_disk", {"model_path": str(tmp_path)})
    assert two.tokens() == trained != two.expected

    name = "model.layers.0.self_attn.q_proj.weight"
    original: Any = AutoModelForCausalLM.from_pretrained(small_checkpoint())
    tensors = {name: tensor.contiguous() for name, tensor in original.state_dict().items()}
    half = payload({name: tensors[name][: len(tensors[name]) // 2].contiguous()})
    assert "nothing was written" in two.post("/update_weights_from_tensor", half, 400)["message"]
    assert two.tokens() == trained
    two.post("/update_weights_from_tensor", payload(tensors))
    assert two.tokens() == two.expected


def test_updates_of_released_weights_reach_every_rank_or_none(two: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(small_checkpoint())
    fill_random(model, 99)
    trained = payload({name: tensor.contiguous() for name, tensor in model.state_dict().items()})

    def keep(_: Lending) -> None:
        raise OutOfHostMemoryError("there is no room", needed_bytes=7)

    two.post("/release_memory_occupation")
    with monkeypatch.context() as patch:
        patch.setattr(Lending, "keep", keep)  # of this process, which is rank 0; the other one has kept it
        assert two.post("/update_weights_from_tensor", trained, 507)["message"] == "rank 0: there is no room"
    two.post("/resume_memory_occupation")
    assert two.tokens() == two.expected
    two.post("/release_memory_occupation")
    two.post("/update_weights_from_tensor", trained)
    two.post("/resume_memory_occupation")
    assert two.tokens() != two.expected
    two.post("/update_weights_from_disk", {"model_path": str(small_checkpoint())})


def test_discarded_weights_are_written_again(two: Served) -> None:
    two.post("/release_memory_occupation", {"restore": {"weights": "discard"}})
    two.post("/resume_memory_occupation")
    assert "content of weights was discarded" in two.http.get("/readyz").json()["reason"]
    two.post("/update_weights_from_disk", {"model_path": str(small_checkpoint())})
    assert two.tokens() == two.expected


def test_a_second_engine_is_refused(two: Served) -> None:
    with pytest.raises(RuntimeError, match=r"torch\.distributed is in use"):
        TransformersEngine(tensor_parallel=2, **SIZES)
    assert two.tokens() == two.expected


@pytest.mark.parametrize("ranks", [4, 3])
def test_heads_must_divide(ranks: int) -> None:
    with pytest.raises(ValueError, match="2 key-value heads evenly; tensor_parallel can be 1, 2"):
        TransformersEngine(tensor_parallel=ranks, **SIZES)


def test_a_frozen_rank_is_not_ready(two: Served) -> None:
    """Before anything waits for it. It is alive: it computes again once it is continued."""
    pid = two.pids()[1]
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: two.http.get("/readyz").status_code == 503)
        for path in ("/readyz", "/health_generate"):
            assert f"stopped by a signal or a debugger: rank 1 (process {pid})" in two.http.get(path).text
        assert two.http.get("/livez").status_code == 200
        ranks = two.http.get("/memory_occupation").json()["ranks"]
        assert [(rank["alive"], rank["stopped"]) for rank in ranks] == [(True, False), (True, True)]
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: two.http.get("/readyz").status_code == 200)
    assert two.tokens() == two.expected


def test_an_abort_does_not_wait_for_a_frozen_rank(two: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memsaver_server.engine.controller.CANCEL_S", 0.1)
    pid = two.pids()[1]
    os.kill(pid, signal.SIGSTOP)
    try:
        accepted = two.post("/release_memory_occupation", {"prepare": True, "async": True}, 202)
        address = accepted["location"]
        wait_until(lambda: two.http.get(address).json()["phase"] == "check")
        late = two.post(f"{address}/abort", status=504)
        assert late["error"]["type"] == "phase_timeout"
        assert f"stopped by a signal or a debugger: rank 1 (process {pid})" in late["message"]
        assert two.http.get(address).json()["status"] == "running"
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: two.http.get(address).json()["status"] == "cancelled")
    assert two.post(f"{address}/abort")["status"] == "cancelled"
    assert two.tokens() == two.expected


@pytest.mark.guards("a rank was killed while memory was released, and probes went on saying that it was well")
def test_a_rank_dies_while_released(two: Served) -> None:
    two.post("/release_memory_occupation")
    pid = two.pids()[1]
    os.kill(pid, signal.SIGKILL)
    try:
        is_dead(two, f"rank 1 (process {pid})")
        reason = two.post("/resume_memory_occupation", status=500)["message"]
        assert reason.startswith(f"the engine has failed for good: rank 1 (process {pid})")
        assert reason.count("restart") == 1
        assert two.post("/resume_memory_occupation", {"dry_run": True})["blockers"] == [reason]
    finally:
        two.close()  # a process has one group of ranks


def test_four_ranks_compute_what_one_does(four: Served) -> None:
    assert four.tokens() == four.expected
    four.post("/release_memory_occupation")
    four.post("/resume_memory_occupation")
    assert four.tokens() == four.expected


@pytest.mark.guards("a rank was killed while memory was released, and probes went on saying that it was well")
def test_a_rank_dies_while_it_computes(four: Served) -> None:
    """Requests in flight are answered with an error, and name the rank."""
    pid = four.pids()[2]
    try:
        request = four.engine.submit(LONG)
        os.kill(pid, signal.SIGKILL)
        who = rf"rank 2 \(process {pid}\) was killed by signal 9"
        with pytest.raises(RanksFailedError, match=who):
            request.result(600)
        is_dead(four, f"rank 2 (process {pid})")
        with pytest.raises(RuntimeError, match=who):
            four.engine.submit(PROMPT)
        refused = four.http.post("/generate", json=PROMPT)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "engine_dead")
        assert re.search(who, refused.json()["message"])
    finally:
        four.close()  # a process has one group of ranks


@pytest.mark.parametrize("what", ["step", "update"])
def test_a_frozen_rank_is_noticed(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """What waits for it is answered with an error that names it, and the engine has failed."""
    with closing(Served(2, compared=False)) as served:
        monkeypatch.setitem(LIMITS_S, what, 2.0)  # not of the steps that it takes before it serves
        pid = served.pids()[1]
        os.kill(pid, signal.SIGSTOP)
        if what == "step":
            answer = served.http.post("/generate", json=PROMPT)
        else:
            answer = served.http.post("/update_weights_from_disk", json={"model_path": str(small_checkpoint())})
        assert answer.status_code == 500
        assert f"rank 1 (process {pid}) does not answer: the {what} did not end in 2 s" in answer.text
        is_dead(served, f"rank 1 (process {pid}) does not answer")


def test_a_start_that_fails_leaves_no_socket(tmp_path: Path) -> None:
    named = {**environment(), "TMPDIR": str(tmp_path)}
    ran = forks.run([sys.executable, "-c", SMALL_CACHE], stderr=forks.PIPE, text=True, timeout=800, env=named)
    assert ran.returncode == 1
    assert "kv_cache_bytes" in ran.stderr
    assert not list(tmp_path.glob("memsaver-ranks-*"))


@pytest.mark.parametrize("when", ["before it joins", "while it loads"])
def test_a_rank_that_is_frozen_during_load_is_noticed(when: str) -> None:
    """The process that waits for it ends."""
    ran = forks.run(
        [sys.executable, "-c", FROZEN_LOAD, when], stderr=forks.PIPE, text=True, timeout=800, env=environment()
    )
    assert ran.returncode == 1
    assert re.search(r"rank 1 \(process \d+\) does not answer: the load did not end in 5 s; restart", ran.stderr)


def test_a_frozen_rank_does_not_keep_the_service() -> None:
    """It ends although an update waits for the rank, which ends, too."""
    with (
        serving(*TWO_RANKS, program=FORKED_RANKS) as server,
        httpx.Client(base_url=server.url, timeout=600, verify=False) as http,
        ThreadPoolExecutor() as pool,
    ):
        rank = os.pidfd_open(http.get("/memory_occupation").json()["ranks"][1]["pid"])
        signal.pidfd_send_signal(rank, signal.SIGSTOP)
        try:
            update = pool.submit(http.post, "/update_weights_from_disk", json={"model_path": str(small_checkpoint())})
            busy = 'memsaver_connections{state="busy"} 2.0'  # the update, and the one that reads this
            wait_until(lambda: busy in http.get("/metrics").text)
            assert server.end() == 0
            wait_until(lambda: select.select([rank], [], [], 0)[0])  # it was killed, but may end a moment later
            assert not isinstance(update.exception(600), httpx.TimeoutException)
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank, signal.SIGKILL)
            os.close(rank)


def test_ranks_end_with_the_service() -> None:
    """Also if it is killed, and they are stopped: none is left behind with its memory."""
    with serving(*TWO_RANKS) as server:
        with httpx.Client(base_url=server.url, timeout=600, verify=False) as http:
            assert http.post("/generate", json=PROMPT).status_code == 200
            service, rank = (each["pid"] for each in http.get("/memory_occupation").json()["ranks"])
        assert service == server.process.pid
        ended = os.pidfd_open(rank)
        os.kill(rank, signal.SIGSTOP)
        server.process.kill()
        wait_until(lambda: select.select([ended], [], [], 0)[0])
        os.close(ended)


def test_a_rank_ends_that_starts_after_the_end_of_the_service() -> None:
    with subprocess.Popen(["true"]) as service:
        os.waitid(os.P_PID, service.pid, os.WEXITED | os.WNOWAIT)
        given = pickle.dumps((service.pid, "", "", None)).hex()
        command = [sys.executable, "-m", "memsaver_server.reference.ranks", given, "1"]
        rank = forks.run(command, capture_output=True, text=True, timeout=60)
    assert (rank.returncode, rank.stderr) == (1, "")


def is_dead(served: Served, who: str) -> None:
    """The probes say so, without an operation, and name the rank."""
    wait_until(lambda: served.http.get("/livez").status_code == 503)
    assert who in served.http.get("/livez").json()["reason"]
    assert who in served.http.get("/readyz").json()["reason"]
    assert served.http.get("/memory_occupation").json()["state"] == "failed"


def payload(tensors: dict[str, Any]) -> dict[str, list[str]]:
    return {"serialized_named_tensors": [base64.b64encode(safetensors.torch.save(tensors)).decode()]}
