"""Fuzz target: the query, headers, body and key of each kind of call.

An input is a line of text for each part:

    a letter for the kind of call (a capital: a key is set), and another if the body is to be made from the bytes
    the query
    headers, one a line, up to an empty one
    the body
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request

from memsaver_core.contract.requests import Fields
from memsaver_server import Settings, create_app
from memsaver_server.http import auth, requests
from memsaver_server.routes import tensorrt_llm
from tests.reliability.fuzz_inputs import (
    KEY,
    REFUSALS,
    answered,
    at_once,
    body_for,
    count,
    headers_on_the_wire,
    names_of,
    parts_of,
    request_of,
)
from tests.service.tensor_engine import Memory, TensorEngine

#: Every kind of body in the API description.
MODELS = sorted(Fields.__subclasses__(), key=lambda model: model.__name__)
SHARE = 0.5
SEEDS = [
    *(
        bytes([97 + number]) + text
        for number in range(len(MODELS))
        for text in (
            b'\n\n\n{"tags": ["weights", "kv_cache"], "timeout_s": 2.5, "mode": "keep", "restore": {"t": "file"}}',
            b"g\n\n\n\n" + bytes(range(number, 250, 3)),
        )
    ),
    b'H\n\nauthorization: Bearer the key\n\n{"at_least_bytes": 1, "trim": true, "hibernate": false, "async": true}',
    b'b\ntags=weights&tags=kv_cache&wait=1\nhost: localhost:30000\n\n{"tags": null, "wait_for_memory_s": 1e3}',
    b'C\n\nauthorization: Basic dGhlIGtleQ==\nsec-fetch-site: same-origin\n\n{"mode": "in_place"}',
    b"d\nlevel=2&mode=abort\nhost: [::1]:1\nuser-agent: trainer/1\n\n",
    b'E\n\nx-trtllm-rl-control-auth: sha256=00\nidempotency-key: 7\n\n{"tags": ["scheduling"]}',
    b"f\n\nhost: attacker.example\ncontent-length: 99999999999\n\n[1, {}]",
    b'G\n\nx-forwarded-host: a\n\n{"model_path": "/models/a"}',
    b'g\nflush_cache=false\n\n\n{"serialized_named_tensors": ["AAAA"], "load_format": null, "flush_cache": "no"}',
]
DICTIONARY = [*(name for model in MODELS for name in names_of(model)), "authorization: Bearer the key", "true", "null"]


class Target:
    """Parses one input after another as the service would."""

    def __init__(self) -> None:
        engine = TensorEngine(Memory(weights_bytes=4096, kv_bytes=4096))
        self.apps = [create_app(engine, Settings(api_key=key, max_body_bytes=2048)) for key in (None, KEY)]
        self.reads: list[Callable[[Request], Awaitable[Any]]] = [requests.fields_of(model) for model in MODELS]

    def read(self, data: bytes) -> int:
        """Return -1 for what is not HTTP, so that no further inputs are derived from it."""
        kind, query, head, body = parts_of(data, 2)
        headers = headers_on_the_wire(query, head)
        if headers is None:
            return -1
        count("inputs")
        chosen = kind[0] if kind else 0
        app = self.apps[not chosen & 0x20]  # capitals: with a key
        self._guard(app, query, headers, body)
        number = (chosen | 0x20) % len(MODELS)
        sent = body_for(names_of(MODELS[number]), body) if len(kind) > 1 else body
        request = request_of(app, headers, sent, query=query)
        try:
            fields = at_once(self.reads[number](request))
        except REFUSALS as error:
            count("refused")
            answered(error)
        else:
            count("understood")
            assert type(fields).model_validate(fields.model_dump(by_alias=True, exclude_unset=True)) == fields
            json.dumps(fields.model_dump(mode="json"), allow_nan=False)
        json.dumps(auth.caller(request))
        return 0

    def _guard(self, app: FastAPI, query: bytes, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        with_key = app.state.memsaver.settings.api_key is not None
        for guard in (requests.guard, requests.guard_probes, tensorrt_llm.guard_signed):
            try:
                at_once(guard(request_of(app, headers, body, query=query)))
            except REFUSALS as error:
                answered(error)
            else:
                assert not with_key or guard is requests.guard_probes or has_the_key(headers)


def has_the_key(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether some header carries the required key, implemented independently of the service."""
    given = [value for name, value in headers if name == b"authorization"]
    return bool(given) and given[0].lower().startswith(b"bearer ") and given[0][7:].strip(b" \t") == KEY.encode()
