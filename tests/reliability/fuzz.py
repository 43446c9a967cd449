"""Fuzzes how requests are read: query, headers and body of each kind, followed by coverage of the code that reads them.

python -m tests.reliability.fuzz [--runs N] [--seconds S]

An input is a line of text for each part:

    a letter for the kind of request (a capital: a key is set), and another if the body is to be made from the bytes
    the query
    headers, one a line, up to an empty one
    the body

Whatever it is, it is either understood or refused with an answer; it is never let in without the key. The last line
printed is JSON. An input that breaks this is written to build/reliability and named.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["memsaver_server"], enable_loader_override=False):
    from memsaver_server import Settings, create_app, problems, schemas, trust
    from memsaver_server.routes import requests, tensorrt_llm

import h11
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.requests import Request

from tests.reliability.figures import FOLDER
from tests.service.tensor_engine import Memory, TensorEngine

KEY = "the key"
LONGEST = 4096
MODELS = [
    schemas.ReleaseFields,
    schemas.ResumeFields,
    schemas.PauseFields,
    schemas.SleepFields,
    schemas.WakeFields,
    schemas.NoFields,
    schemas.UpdateFromDiskFields,
    schemas.UpdateFromTensorFields,
]
REFUSALS = (problems.BadRequestError, problems.BodyTooLargeError, problems.ForbiddenError, problems.UnauthorizedError)
SEEDS = [
    b'a\n\n\n{"tags": ["weights", "kv_cache"], "timeout_s": 2.5, "mode": "keep", "restore": {"weights": "file"}}',
    b'A\n\nauthorization: Bearer the key\n\n{"at_least_bytes": 1, "trim": true, "hibernate": false, "async": true}',
    b'b\ntags=weights&tags=kv_cache&wait=1\nhost: localhost:30000\n\n{"tags": null, "wait_for_memory_s": 1e3}',
    b'C\n\nauthorization: Basic dGhlIGtleQ==\nsec-fetch-site: same-origin\n\n{"mode": "in_place"}',
    b"d\nlevel=2&mode=abort\nhost: [::1]:1\nuser-agent: trainer/1\n\n",
    b'E\n\nx-trtllm-rl-control-auth: sha256=00\nidempotency-key: 7\n\n{"tags": ["scheduling"]}',
    b"f\n\nhost: attacker.example\ncontent-length: 99999999999\n\n[1, {}]",
    b"G\n\nx-trtllm-runtime-control-auth: sha256=0\nx-trtllm-runtime-control-timestamp: 1790000000\n"
    b'x-trtllm-runtime-control-nonce: 0123456789abcdef0123456789abcdef\n\n{"model_path": "/models/a"}',
    *(bytes([97 + number]) + b"g\n\n\n\n" + bytes(range(number, 250, 3)) for number in range(8)),
    b'h\nflush_cache=false\n\n\n{"serialized_named_tensors": ["AAAA"], "load_format": null, "flush_cache": "no"}',
]

#: libFuzzer ends its process without a word to Python, so that these are kept where the parent sees them.
COUNTED = ("inputs", "understood", "refused")
counters = memoryview(mmap.mmap(-1, 8 * len(COUNTED))).cast("Q")


def count(what: str) -> None:
    counters[COUNTED.index(what)] += 1


def at_once(work: Coroutine[Any, Any, Any]) -> Any:
    """Run what waits for nothing but its own input."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits for something")


def headers_on_the_wire(query: bytes, head: bytes) -> list[tuple[bytes, bytes]] | None:
    """The headers as the server's parser gives them; None where it refuses them itself."""
    wire = h11.Connection(h11.SERVER)
    wire.receive_data(b"POST /?" + query + b" HTTP/1.0\r\n" + head.replace(b"\n", b"\r\n") + b"\r\n\r\n")
    try:
        event = wire.next_event()
    except h11.RemoteProtocolError:
        return None
    return list(event.headers) if isinstance(event, h11.Request) else None


def request_of(app: FastAPI, query: bytes, headers: list[tuple[bytes, bytes]], body: bytes) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/release_memory",
        "query_string": query,
        "headers": headers,
        "app": app,
        "server": ("127.0.0.1", 30000),
        "client": ("127.0.0.1", 40000),
        "scheme": "http",
    }
    return Request(scope, receive)


def has_the_key(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether some header carries what the key is needed for: said here in other words than the service does."""
    given = [value for name, value in headers if name == b"authorization"]
    return bool(given) and given[0].lower().startswith(b"bearer ") and given[0][7:].strip(b" \t") == KEY.encode()


@atheris.instrument_func  # so that other bodies are new ground
def body_for(model: type[BaseModel], data: bytes) -> bytes:
    """JSON with fields of the model, and values of every kind: few random bytes are JSON."""
    provider = atheris.FuzzedDataProvider(data)
    names = [field.alias or name for name, field in model.model_fields.items()] + ["other"]
    given = {}
    for _ in range(provider.ConsumeIntInRange(0, 4)):
        given[provider.PickValueInList(names)] = value_from(provider, 3)
    return json.dumps(given).encode()


@atheris.instrument_func
def value_from(provider: atheris.FuzzedDataProvider, depth: int) -> Any:
    words = [
        "weights",
        "kv_cache",
        "host",
        "zero",
        "abort",
        "keep",
        "retract",
        "true",
        "1",
        "NaN",
        "\ud800",
        "\x00",
        "",
    ]
    match provider.ConsumeIntInRange(0, 8 if depth else 6):
        case 0:
            return None
        case 1:
            return provider.ConsumeBool()
        case 2:
            return provider.ConsumeInt(12)
        case 3:
            return provider.ConsumeFloat()  # infinities and what is no number, too
        case 4:
            return provider.ConsumeUnicode(provider.ConsumeIntInRange(0, 300))
        case 5 | 6:
            return provider.PickValueInList(words)
        case 7:
            return [value_from(provider, depth - 1) for _ in range(provider.ConsumeIntInRange(0, 3))]
        case _:
            return {
                str(provider.PickValueInList(words)): value_from(provider, depth - 1)
                for _ in range(provider.ConsumeIntInRange(0, 3))
            }


class Reader:
    """Reads one input after another as the service would."""

    def __init__(self) -> None:
        engine = TensorEngine(Memory(weights_bytes=4096, kv_bytes=4096))
        self.apps = [create_app(engine, Settings(api_key=key, max_body_bytes=2048)) for key in (None, KEY)]
        self.reads: list[Callable[[Request], Awaitable[Any]]] = [requests.fields_of(model) for model in MODELS]

    def read(self, data: bytes) -> int:
        """Return -1 for what is no HTTP, so that it is no base of further inputs."""
        kind, _, rest = data.partition(b"\n")
        query, _, rest = rest.partition(b"\n")
        head, _, body = rest.partition(b"\n\n") if not rest.startswith(b"\n") else (b"", b"", rest[1:])
        headers = headers_on_the_wire(query, head)
        if headers is None:
            return -1
        count("inputs")
        chosen = kind[0] if kind else 0
        app = self.apps[not chosen & 0x20]  # capitals: with a key
        self._guard(app, query, headers, body)
        number = chosen % len(MODELS)
        request = request_of(app, query, headers, body_for(MODELS[number], body) if len(kind) > 1 else body)
        try:
            fields = at_once(self.reads[number](request))
        except REFUSALS as error:
            count("refused")
            answered(error)
        else:
            count("understood")
            assert type(fields).model_validate(fields.model_dump(by_alias=True)) == fields
            json.dumps(fields.model_dump(mode="json"), allow_nan=False)
        json.dumps(trust.caller(request))
        return 0

    def _guard(self, app: FastAPI, query: bytes, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        with_key = app.state.memsaver.settings.api_key is not None
        for guard in (requests.guard, tensorrt_llm.guard_signed):
            try:
                at_once(guard(request_of(app, query, headers, body)))
            except REFUSALS as error:
                answered(error)
            else:
                assert not with_key or has_the_key(headers)


def answered(error: Exception) -> None:
    """What the caller gets can be sent, and blames the caller."""
    problem = problems.problem_of(error)
    assert 400 <= problem.status < 500
    JSONResponse(problem.body(), problem.status, headers=problem.headers)


def fuzz(runs: int, seconds: int, seed: int, corpus: str) -> None:
    """Ends the process: with 0, or where an input breaks something, with its traceback."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(SEEDS):
        (Path(corpus) / f"{number}").write_bytes(text)
    limits = [f"-runs={runs}"] if runs else []
    options = [f"-max_len={LONGEST}", f"-seed={seed}", f"-max_total_time={seconds}", "-timeout=10"]
    options.append(f"-artifact_prefix={FOLDER}/")
    atheris.Setup([sys.argv[0], corpus, *options, *limits], Reader().read)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=0, help="inputs; 0 for as many as the seconds allow")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as corpus:
        child = os.fork()
        if child == 0:
            fuzz(arguments.runs, arguments.seconds, arguments.seed, corpus)
        _, status = os.waitpid(child, 0)
    counts: dict[str, float] = dict(zip(COUNTED, counters, strict=True))
    print(json.dumps({**counts, "seconds": round(time.monotonic() - began, 1)}))
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
