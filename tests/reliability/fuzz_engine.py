"""Fuzz target: what the reference engine parses itself, the body of ``/generate`` and the payload of a weight
update.

The last three bits of an input's first byte select: 0 a body of ``/generate``, 1 the body of an update, 2 to 4 a
generation made from the bytes, 5 to 7 an update made from them. The rest is the body, or those bytes.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from typing import Any

import atheris
import torch
from fastapi.responses import JSONResponse

from memsaver_core.contract.errors import BadRequestError
from memsaver_server import Settings, create_app
from memsaver_server.http import requests
from memsaver_server.reference.engine import TransformersEngine
from memsaver_server.reference.requests import NEUTRAL, Sampling
from memsaver_server.routes import weights
from tests.reliability.fuzz_inputs import (
    NUMBERS,
    answered,
    at_once,
    body_for,
    count,
    names_of,
    request_of,
    value_from,
)

SHARE = 0.2
LIMIT = 1 << 16
TENSOR = "model.norm.weight"
SAMPLING = [*Sampling.model_fields, *NEUTRAL, "sampling_seed"]
#: Element types of safetensors with their bits, and one that does not exist.
KINDS = {"F32": 32, "BF16": 16, "F64": 64, "I64": 64, "U16": 16, "BOOL": 8, "C64": 64, "F8_E4M3": 8, "?": 8} | {
    "F4": 4,
    "F6_E2M3": 6,
    "F8_E8M0": 8,
}


def image(header: bytes, content: bytes) -> bytes:
    """A safetensors image."""
    return struct.pack("<Q", len(header)) + header + content


def update(payload: bytes, **other: Any) -> bytes:
    return json.dumps({"serialized_named_tensors": [base64.b64encode(payload).decode()], **other}).encode()


def header_of(name: str, kind: str, shape: list[int], end: int) -> bytes:
    return json.dumps({name: {"dtype": kind, "shape": shape, "data_offsets": [0, end]}}).encode()


SEEDS = [
    b'0{"text": "Memory", "sampling_params": {"max_new_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 3}}',
    b'0{"input_ids": [1, 2, 3], "rid": "7", "sampling_params": {"seed": 1, "stop_token_ids": [3], "temperature": 1}}',
    b'0{"text": null, "input_ids": [255], "sampling_params": {"n": 1, "stop": [], "regex": null, "ignore_eos": true}}',
    b"1" + update(image(header_of(TENSOR, "F32", [256], 1024), bytes(1024))),
    b"1" + update(image(b"{}", b""), load_format="safetensors", flush_cache=False),
    b'1{"serialized_named_tensors": ["gASVAA==", "YQ=="], "load_format": "flattened_bucket"}',
    *(letter + bytes(range(number, 250, 3)) for letter in (b"2", b"5") for number in range(4)),
]
DICTIONARY = [*SAMPLING, "input_ids", "sampling_params", "dtype", "data_offsets", TENSOR, "load_format", "1e-320"]


class Target:
    """One engine, whose weights must not change by anything that it refuses."""

    def __init__(self) -> None:
        self.engine = TransformersEngine(kv_cache_bytes=1 << 20, max_len=64)
        self.own = dict(self.engine.runner.model.named_parameters())
        self.logits = torch.linspace(-30, 30, self.engine.runner.vocabulary)
        self.app = create_app(self.engine, Settings(max_body_bytes=LIMIT))
        self.read_update = requests.fields_of(weights.UpdateFromTensor)

    def read(self, data: bytes) -> int:
        count("inputs")
        body = data[1:]
        try:
            match data[0] % 8 if data else 0:
                case 0:
                    self._generate(body)
                case 1:
                    self._update(body)
                case 2 | 3 | 4:
                    self._generate(generation_from(body))
                case _:
                    self._update(update_from(body))
        except BadRequestError as error:
            count("refused")
            answered(error)
        else:
            count("understood")
        return 0

    def _generate(self, body: bytes) -> None:
        asked = at_once(requests.json_of(request_of(self.app, [], body)))
        try:
            parsed = self.engine._parse(asked)
        except ValueError as error:
            raise BadRequestError(str(error)) from None
        while parsed.finish is None and len(parsed.output) < 3:
            token = parsed.pick(self.logits)
            assert 0 <= token < len(self.logits)
            parsed.accept(token, frozenset([7]), self.engine.runner.length)
        JSONResponse(self.engine._answer(parsed))

    def _update(self, body: bytes) -> None:
        fields = at_once(self.read_update(request_of(self.app, [], body)))
        before = self._writes()
        try:
            written = self.engine.update_weights_from_tensor(
                fields.serialized_named_tensors,
                load_format=fields.load_format,
                flush_cache=fields.flush_cache,
                abort_all_requests=fields.abort_all_requests,
            )
        except ValueError as error:
            assert self._writes() == before
            raise BadRequestError(str(error)) from None
        assert self._writes() == before + written

    def _writes(self) -> int:
        """How often tensors were written, as torch counts."""
        return sum(tensor._version for tensor in self.own.values())


@atheris.instrument_func
def generation_from(data: bytes) -> bytes:
    provider = atheris.FuzzedDataProvider(data)
    given: dict[str, Any] = {"input_ids": [provider.ConsumeIntInRange(0, 255)]}
    if provider.ConsumeIntInRange(0, 3) == 0:
        given = {provider.PickValueInList(["text", "input_ids"]): value_from(provider, 2)}
    for name in ("rid", "sampling_params"):
        if provider.ConsumeIntInRange(0, 7) == 0:
            given[name] = value_from(provider, 2)
    given.setdefault("sampling_params", {})
    if isinstance(given["sampling_params"], dict):
        for _ in range(provider.ConsumeIntInRange(0, 3)):
            value = provider.PickValueInList(NUMBERS) if provider.ConsumeBool() else value_from(provider, 2)
            given["sampling_params"][provider.PickValueInList(SAMPLING)] = value
    return json.dumps(given).encode()


@atheris.instrument_func
def update_from(data: bytes) -> bytes:
    """A payload that is valid except for what the bytes change."""
    provider = atheris.FuzzedDataProvider(data)
    if provider.ConsumeIntInRange(0, 7) == 0:
        return body_for(names_of(weights.UpdateFromTensor), provider.ConsumeBytes(provider.remaining_bytes()))
    name = provider.PickValueInList([TENSOR, "lm_head.weight", "model.no.weight", "__metadata__", ""])
    kind = provider.PickValueInList(list(KINDS))
    shape = provider.PickValueInList([[256], [256, 1], [0], [], [2, provider.ConsumeIntInRange(0, 128)]])
    length = math.prod(shape) * KINDS[kind] // 8
    if provider.ConsumeIntInRange(0, 7) == 0:
        length = provider.ConsumeIntInRange(0, 1100)
    payload = bytearray(image(header_of(name, kind, shape, length), bytes(length)))
    for _ in range(provider.ConsumeIntInRange(0, 2)):
        payload[provider.ConsumeIntInRange(0, len(payload) - 1)] ^= provider.ConsumeIntInRange(1, 255)
    return update(bytes(payload), flush_cache=provider.ConsumeBool())
