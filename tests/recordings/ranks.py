"""What ranks are asked and answer: each message as plain data, and those of an engine of two ranks."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import memsaver_core as ms
from memsaver_core.contract.errors import OutOfDeviceMemoryError
from memsaver_core.contract.policies import RestorePolicy
from memsaver_core.contract.reports import DeviceDelta, MeteredDelta, OperationReport, PhaseReport, TagReport
from memsaver_core.contract.requests import MemoryRequest
from memsaver_core.contract.status import (
    CommunicatorStatus,
    DeviceMemory,
    HostBackupStatus,
    Progress,
    RankStatus,
    SharedStoreStatus,
    Status,
    TagStatus,
)
from memsaver_core.ranks import protocol
from memsaver_core.ranks.connection import SocketChannel, serve
from memsaver_core.ranks.protocol import ANSWERS, REQUESTS, Plain
from memsaver_core.ranks.rank import Rank
from memsaver_core.rendezvous import Listener
from memsaver_server.engine.gate import Gate
from memsaver_server.ranks.memory import RankMemory

from .engines import Site, served
from .normal import Names, brief

RELEASE = MemoryRequest(
    tags=("weights", "kv_cache"),
    restore={"weights": RestorePolicy.FILE, "kv_cache": RestorePolicy.DISCARD},
    trim=False,
    hibernate=True,
)
RESUME = MemoryRequest(tags=("weights",))
#: One of each, with every field set.
SENT: tuple[protocol.Request, ...] = (
    protocol.Introduce(),
    protocol.Prepare("release", RELEASE, exact=True),
    protocol.Prepare("release", MemoryRequest()),
    protocol.Prepare("resume", RESUME),
    protocol.Move("release", RELEASE),
    protocol.Move("release", MemoryRequest()),
    protocol.Move("resume", RESUME),
    protocol.Move("resume", MemoryRequest()),
    protocol.Reserve("resume", RESUME),
    protocol.Reserve("release", RELEASE),
    protocol.GiveBackReserved(),
    protocol.MoveCommunicators("release", ("tp", "pp"), 30.0),
    protocol.MoveCommunicators("resume", ("tp",), 30.0),
    protocol.HibernationStep("checkpoint"),
    protocol.ExpectRelease(RELEASE),
    protocol.TakeOutcome(),
    protocol.SleepNow(RELEASE, 2),
    protocol.Resize(7),
    protocol.WriteAsleep("lend", "weights", 2),
)
RANKS = 2
KIB = 1 << 10


def ranks(_folder: Path) -> Iterator[tuple[str, Any]]:
    """The recordings of the rank protocol."""
    assert {type(each) for each in SENT} == set(protocol.Request.__subclasses__())
    decoded = [REQUESTS.decode(REQUESTS.encode(each)) for each in SENT]
    assert decoded == list(SENT)
    answers = list(_answers())
    assert [ANSWERS.decode(ANSWERS.encode(each)) for each in answers] == answers
    yield (
        "rank_messages",
        {
            "requests": [REQUESTS.encode(each) for each in SENT],
            "answers": [ANSWERS.encode(each) for each in answers],
        },
    )
    yield "rank_operations", _operations()


def _answers() -> Iterator[protocol.Answer]:
    """Answers in which no field has its default."""
    communicator = _of(CommunicatorStatus, "tp", 2, 1, 3, 4, 5, True, "an obstacle")
    device = _of(DeviceMemory, 0, "GPU-0", "a device", 6, 5, 4)
    delta = _of(DeviceDelta, 0, "GPU-0", 5, 4, -1)
    metered = _of(MeteredDelta, 0, "GPU-0", 5, 4, -1, "a device", 6, 3)
    store = _of(SharedStoreStatus, "store", 1, 2, 3, 4, 5, 6)
    tag = ("weights", "host", "released", "lost", 8, 0, 8, 9, 1, 7, 6, 2, 3, {0: 1}, {0: 8}, {0: 9}, 1, 5, 4)
    status = Status(
        enabled=True,
        driver="cuda",
        state="released",
        failure="a failure",
        tags=(_of(TagStatus, *tag),),
        host_backup=_of(HostBackupStatus, 1, 2, 3, 4, False, 6, store, 5),
        progress=_of(Progress, "release", 1, 2, 3, 4.5),
        hibernated=True,
        communicators=(communicator,),
        shared=("something",),
        reserved_by_device={0: 9},
        ranks=(_of(RankStatus, 1, 2, True, "resident", True, 3),),
    )
    introduction = protocol.Introduction((device,), ("an obstacle",), 7, protocol.ProgressLocation(7, 8, 9))
    plan = protocol.Plan(1, (communicator,), ("an obstacle",))
    report = OperationReport(
        operation="release",
        enabled=False,
        seconds=2.5,
        released_bytes=1,
        resumed_bytes=2,
        tags=(_of(TagReport, "weights", "host", "released", *range(1, 10), True),),
        phases=(_of(PhaseReport, "pause", 1.5, (delta,), {"copied_bytes": 2.0}),),
        devices=(metered,),
    )
    failure = protocol.Failure.of(
        OutOfDeviceMemoryError("too little", needed_bytes=2, free_bytes=1, device=0), "restore"
    )
    yield protocol.Answer(status, introduction)
    yield protocol.Answer(status.model_copy(update={"failure": ""}), plan=plan)
    yield protocol.Answer(None, report=report)
    yield protocol.Answer(None, failure=failure)
    yield protocol.Answer(None, failure=protocol.Failure.of(KeyError("x")))


def _of(model: type[Any], *values: Any) -> Any:
    """Return the model with these values of its fields, in their order."""
    return model(**dict(zip(model.model_fields, values, strict=True)))


class _Tapped:
    """A channel that keeps what is sent and answered, as plain data."""

    def __init__(self, channel: SocketChannel) -> None:
        self._channel = channel
        self.sent: list[Any] = []

    def start(self, message: Plain) -> Future[list[Plain]]:
        answer = self._channel.start(message)
        self.sent.append([message, answer])
        return answer


class _Engine(Gate):
    """An engine whose memory is its ranks'."""

    def __init__(self, channel: _Tapped) -> None:
        super().__init__("an engine of ranks")
        self.memory = RankMemory(channel)

    def unblock(self) -> None:
        """It is never blocked."""

    def close(self) -> None:
        self.memory.close()


def _operations() -> list[Any]:
    """Calls of an engine of two ranks, with the messages that each leads to."""
    name = f"recordings-{os.getpid()}"
    with _forked(name) as channel:
        tapped = _Tapped(channel)
        engine = _Engine(tapped)
        texts = {name: "DEVICE"}
        found: list[Any] = [{"messages": _messages(tapped, Names(texts), whole=True)}]
        with served(engine) as site:  # type: ignore[arg-type]
            for line, body in (
                ("POST /release_memory_occupation", {}),
                ("POST /release_memory_occupation", {}),
                ("POST /resume_memory_occupation", {}),
                ("POST /release_memory_occupation", {"tags": ["kv_cache"], "trim": True}),
                ("POST /resume_memory_occupation", {"tags": ["kv_cache"]}),
                ("POST /sleep", {"level": 2}),
                ("POST /wake_up", {}),
                ("POST /content_written", {}),
                ("POST /release_memory_occupation", {"hibernate": True, "trim": False}),
                ("POST /resume_memory_occupation", {"tags": ["weights"]}),
                ("POST /wake_up", {}),
                ("POST /release_memory_occupation", {"dry_run": True}),
                ("POST /release_memory_occupation", {"restore": {"weights": "file"}, "at_least_bytes": 1}),
                ("POST /resume_memory_occupation", {}),
                ("POST /release_memory_occupation", {"tags": ["no_such_tag"]}),
                ("GET /memory_occupation", {}),
            ):
                found.append(_call(site, tapped, line, body, texts, whole=len(found) in (1, 3)))
            found += _prepared(site, tapped, texts)
    return found


def _call(site: Site, tapped: _Tapped, line: str, body: Any, texts: dict[str, str], *, whole: bool = False) -> Any:
    tapped.sent.clear()
    scenario = site.scenario(texts, keep=True)
    scenario.call(line, body, whole=whole or line.startswith("GET"))
    return {**scenario.steps[0], "messages": _messages(tapped, scenario.names, whole=whole)}


def _prepared(site: Site, tapped: _Tapped, texts: dict[str, str]) -> list[Any]:
    found = []
    for verb in ("release", "resume"):
        for end in ("abort", "commit"):
            answer = site.http.post(f"/{verb}_memory_occupation", json={"prepare": True, "lease_s": 600}).json()
            prepared = _messages(tapped, Names(texts))
            step = _call(site, tapped, f"POST /operations/{answer['operation_id']}/{end}", {}, texts)
            found.append({"prepared": verb, "messages_of_the_preparation": prepared, **step})
    return found


def _messages(tapped: _Tapped, names: Names, *, whole: bool = False) -> list[Any]:
    """What was sent since the last call of this, and what both ranks answered; in brief what kind of answer it was."""
    found = []
    for message, answer in tapped.sent:
        said = [_brief(each["fields"]) if not whole else each for each in answer.result(600)]
        found.append(
            names.normal([{message["type"]: message["fields"]}, *brief(said)] if not whole else [message, *said])
        )
    tapped.sent.clear()
    return found


def _brief(fields: Plain) -> str:
    kinds = [kind for kind in ("introduction", "plan", "report", "failure") if fields[kind] is not None]
    tags = [f"{tag['tag']} {tag['state']}" for tag in fields["status"]["tags"]]
    return f"{', '.join(kinds) or 'nothing'}; {', '.join(tags)}"


@contextmanager
def _forked(name: str) -> Iterator[SocketChannel]:
    """Run the ranks as processes while the block runs. This process has no other thread and no saver yet."""
    listener = Listener(RANKS, first=0)
    pids = []
    for rank in range(RANKS):
        if not (pid := os.fork()):
            try:
                _run(rank, listener.path, f"{name}-{rank}")
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        pids.append(pid)
    channel = SocketChannel(None, listener.accept(60))
    try:
        yield channel
    finally:
        channel.close()
        for pid in pids:
            os.waitpid(pid, 0)


def _run(rank: int, path: str, device: str) -> None:
    """The life of a rank."""
    ms.configure(host_device=device, host_capacity=1 << 20)
    held = []
    for tag, size in (("weights", 64 * KIB), ("kv_cache", (32 + 32 * rank) * KIB)):
        with ms.region(tag):
            held.append(torch.full((size,), 7 + rank, dtype=torch.uint8))
    serve(path, rank, Rank().answer)
