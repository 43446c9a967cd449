"""Fuzz target: TensorRT-LLM's signed calls, in which what is signed and what is sent may differ."""

from __future__ import annotations

import hmac
import re
import time
from dataclasses import dataclass, replace

import atheris

from memsaver_server import Settings, create_app
from memsaver_server.http.request_signing import NonceCache
from memsaver_server.routes import tensorrt_llm
from tests.reliability.fuzz_inputs import (
    KEY,
    REFUSALS,
    answered,
    at_once,
    count,
    headers_on_the_wire,
    request_of,
)
from tests.service.tensor_engine import Memory, TensorEngine

SHARE = 0.1
SEEDS = [bytes(range(number, 250, step)) for number in range(8) for step in (1, 5)]
DICTIONARY = ["sha256=", "0123456789abcdef" * 2]

PATHS = ["/release_memory", "/resume_memory", "/memory_status", "/engine/release_memory"]
SIGNATURES = ["x-trtllm-runtime-control-auth", "x-trtllm-rl-control-auth"]
TIMESTAMP = "x-trtllm-runtime-control-timestamp"
NONCE = "x-trtllm-runtime-control-nonce"
#: The maximum age of a signature, and this test's distance from it, because time passes while it runs.
VALID_S, CLOSE_S = 300, 30


@dataclass(frozen=True)
class Signed:
    """What a signature covers. The older kind has no timestamp and no nonce, and covers only the body."""

    key: str
    method: str
    path: str
    timestamp: str
    nonce: str
    body: bytes

    def signature(self, *, dated: bool) -> str:
        head = "\n".join(["trtllm-runtime-control-v1", self.method, self.path, self.timestamp, self.nonce, ""])
        text = head.encode() + self.body if dated else self.body
        return "sha256=" + hmac.digest(self.key.encode(), text, "sha256").hex()


class Target:
    """Sends each signed call twice."""

    def __init__(self) -> None:
        engine = TensorEngine(Memory(weights_bytes=4096, kv_bytes=4096))
        self.app = create_app(engine, Settings(api_key=KEY, max_body_bytes=2048))

    def read(self, data: bytes) -> int:
        provider = atheris.FuzzedDataProvider(data)
        now = int(time.time())
        signed = Signed(
            KEY,
            provider.PickValueInList(["POST", "GET"]),
            provider.PickValueInList(PATHS),
            str(now + provider.ConsumeIntInRange(-500, 500)),
            provider.ConsumeBytes(16).ljust(16, b"7").hex(),
            provider.ConsumeBytes(provider.ConsumeIntInRange(0, 60)),
        )
        dated = provider.ConsumeBool()
        header = provider.PickValueInList(SIGNATURES)
        signature = signed.signature(dated=dated)
        sent = signed
        query, more = b"", ""
        match provider.ConsumeIntInRange(0, 17):  # most are sent as signed
            case 0:
                signature = replace(signed, key=text_from(provider)).signature(dated=dated)
            case 1:
                sent = replace(signed, method="PUT")
            case 2:
                sent = replace(signed, path=provider.PickValueInList(PATHS))
            case 3:
                sent = replace(signed, timestamp=text_from(provider))
            case 4:
                sent = replace(signed, nonce=text_from(provider))
            case 5:
                sent = replace(signed, body=signed.body + provider.ConsumeBytes(2))
            case 6:
                signature = text_from(provider)
            case 7:
                # The signed content itself is malformed.
                sent = replace(signed, timestamp=text_from(provider), nonce=text_from(provider))
                signature = sent.signature(dated=dated)
            case 8:
                query = provider.PickValueInList([b"mode=abort", b"hibernate=true", b"x"])
            case 9:
                more = "\nidempotency-key: 7"
        return self._send_twice(sent, f"{header}: {signature}{more}", query, dated=dated)

    def _send_twice(self, sent: Signed, head: str, query: bytes, *, dated: bool) -> int:
        """Send it with ``head``, its signature, and ``query``, which no signature covers."""
        header = head.partition(":")[0]
        if dated:
            head += f"\n{TIMESTAMP}: {sent.timestamp}\n{NONCE}: {sent.nonce}"
        headers = headers_on_the_wire(b"", head.encode("latin-1", "replace"))
        if headers is None:
            return -1
        count("inputs")
        given = {name.decode(): value.decode("latin-1") for name, value in headers}
        arrived = replace(sent, key=KEY, timestamp=given.get(TIMESTAMP, ""), nonce=given.get(NONCE, ""))
        if dated and abs(abs(int(time.time()) - moment(arrived.timestamp)) - VALID_S) < CLOSE_S:
            return -1
        right = given.get(header) == arrived.signature(dated=dated) and not query and "idempotency-key" not in given
        if dated:
            right = right and header == SIGNATURES[0] and is_fresh(arrived)
        self.app.state.memsaver.nonces = NonceCache()
        for expected in (right, right and not dated):  # the older kind can be repeated
            request = request_of(self.app, headers, sent.body, method=sent.method, path=sent.path, query=query)
            try:
                at_once(tensorrt_llm.guard_signed(request))
            except REFUSALS as error:
                answered(error)
                assert not expected
            else:
                assert expected
        count("understood" if right else "refused")
        return 0


def text_from(provider: atheris.FuzzedDataProvider) -> str:
    return str(provider.ConsumeBytes(provider.ConsumeIntInRange(0, 40)).decode("latin-1"))


def moment(timestamp: str) -> int:
    return int(timestamp) if re.fullmatch("[0-9]{1,19}", timestamp) else 0


def is_fresh(arrived: Signed) -> bool:
    good = re.fullmatch("[0-9]{1,19}", arrived.timestamp) and re.fullmatch("[0-9a-f]{32}", arrived.nonce)
    return bool(good) and abs(time.time() - moment(arrived.timestamp)) <= VALID_S
