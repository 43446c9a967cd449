"""One test per client of the contract: its requests as it sends them, and its own rule for accepting answers."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import safetensors.torch

import memsaver_core as ms
from memsaver_server.reference.builtin_model import small_checkpoint
from memsaver_server.reference.engine import TransformersEngine

from .tensor_engine import ALL_TAGS, Memory, TensorEngine

PROMPT = {"input_ids": [3, 5, 8], "sampling_params": {"max_new_tokens": 6, "temperature": 0}}
Serve = Callable[..., httpx.Client]


def tokens(server: httpx.Client) -> list[int]:
    response = server.post("/generate", json=PROMPT)
    assert response.status_code == 200, response.text
    return response.json()["output_ids"]


def released(server: httpx.Client) -> list[str]:
    return server.get("/memory_status").json()["parked_tags"]


@pytest.fixture(scope="module")
def transformers_engine() -> Iterator[TransformersEngine]:
    engine = TransformersEngine()
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=["tensor engine", "transformers engine"])
def kind(request: pytest.FixtureRequest) -> str:
    """The engine to test. One after another, because tags belong to the process."""
    return str(request.param)


@pytest.fixture
def engine(kind: str, request: pytest.FixtureRequest, memory: Memory) -> Iterator[TensorEngine | TransformersEngine]:
    """The small engine of these tests, or the one of ``memsaver serve``."""
    if kind == "tensor engine":
        engine = TensorEngine(memory)
        yield engine
        engine.close()
    else:
        yield request.getfixturevalue("transformers_engine")
        ms.resume()


@pytest.fixture
def weights_folder(engine: TensorEngine | TransformersEngine, tmp_path: Path) -> str:
    """A folder in which a trainer stored the engine's weights."""
    if isinstance(engine, TransformersEngine):
        return str(small_checkpoint())
    path = tmp_path / "weights.safetensors"
    safetensors.torch.save_file({"weights": engine.weights.clone()}, path)
    return str(path)


@pytest.fixture
def bucket(weights_folder: str) -> list[str]:
    """Some of those weights, as a weight update carries them."""
    path = Path(weights_folder)
    file = path if path.is_file() else next(path.glob("*.safetensors"))
    name, tensor = next(iter(safetensors.torch.load_file(file).items()))
    return [base64.b64encode(safetensors.torch.save({name: tensor})).decode()]


def send_and_go_away(server: httpx.Client, path: str, body: bytes) -> None:
    """Send a request whole, and close the connection before its answer."""
    address = urlsplit(str(server.base_url))
    with socket.create_connection((address.hostname, address.port)) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: engine\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)


class SlimeClient:
    """Posts JSON, raises for any status but 2xx, reads JSON; retries a flush up to 60 times until it gets a 200."""

    def __init__(self, server: httpx.Client) -> None:
        self.server = server

    def post(self, endpoint: str, payload: dict[str, object] | None = None) -> object:
        response = self.server.post(f"/{endpoint}", json=payload or {})
        response.raise_for_status()
        return response.json()

    def flush(self) -> None:
        for _ in range(60):
            if self.server.get("/flush_cache").status_code == 200:
                return
        raise TimeoutError("flush_cache never answered 200")


def test_slime(http: httpx.Client, bucket: list[str]) -> None:
    before = tokens(http)
    slime = SlimeClient(http)
    slime.flush()
    slime.post("release_memory_occupation")
    assert released(http) == ALL_TAGS
    slime.post("resume_memory_occupation", {"tags": ["weights"]})
    slime.post("pause_generation")
    slime.flush()
    slime.post("update_weights_from_tensor", {"serialized_named_tensors": bucket, "flush_cache": False})
    slime.post("continue_generation")
    slime.post("resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    assert tokens(http) == before


def test_miles(http: httpx.Client) -> None:
    before = tokens(http)
    miles = SlimeClient(http)
    miles.flush()
    miles.post("release_memory_occupation", {"tags": None})
    miles.post("resume_memory_occupation", {"tags": ["weights"]})
    miles.post("pause_generation", {"mode": "retract"})
    miles.flush()
    miles.post("continue_generation")
    miles.post("resume_memory_occupation", {"tags": ["cuda_graph", "kv_cache"]})
    assert tokens(http) == before
    miles.flush()
    miles.post("release_memory_occupation", {"tags": ["cuda_graph", "kv_cache", "weights"]})
    miles.post("resume_memory_occupation", {"tags": ["cuda_graph", "kv_cache", "weights"]})
    assert tokens(http) == before


def test_nemo_rl(http: httpx.Client) -> None:
    before = tokens(http)
    nemo = SlimeClient(http)
    nemo.flush()
    nemo.post("release_memory_occupation", {"tags": ["weights"]})
    nemo.flush()
    nemo.post("release_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    assert released(http) == ["cuda_graph", "kv_cache", "weights"]
    nemo.post("resume_memory_occupation", {"tags": ["weights"]})
    nemo.post("resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    assert tokens(http) == before


def test_verl(http: httpx.Client) -> None:
    """verl retries up to three times without an answer, and raises on any 4xx or 5xx."""
    before = tokens(http)

    def post(endpoint: str, payload: dict[str, object]) -> None:
        for _ in range(2):
            send_and_go_away(http, f"/{endpoint}", json.dumps(payload).encode())
        # On a new connection like the earlier ones: an open connection would overtake them.
        httpx.post(http.base_url.join(f"/{endpoint}"), json=payload, timeout=600).raise_for_status()

    http.get("/flush_cache", params={"reset_connector": True}).raise_for_status()
    post("release_memory_occupation", {"tags": ["kv_cache", "weights"], "reset_connector": True})
    post("resume_memory_occupation", {"tags": ["weights"]})
    post("resume_memory_occupation", {"tags": ["kv_cache"]})
    assert tokens(http) == before
    post("release_memory_occupation", {"tags": ["kv_cache"], "reset_connector": True})
    assert released(http) == ["kv_cache"]
    post("resume_memory_occupation", {"tags": ["kv_cache"]})
    assert tokens(http) == before


def test_areal_with_sglang(http: httpx.Client) -> None:
    """AReaL allows memory calls 30 s, retries unless it gets a 2xx, and reads JSON if the content type says so."""
    before = tokens(http)

    def call(method: str, path: str, **request: object) -> None:
        response = http.request(method, path, timeout=600, **request)
        assert response.is_success
        if response.headers["content-type"].startswith("application/json"):
            response.json()

    call("GET", "/health")
    call("POST", "/pause_generation")
    call("POST", "/release_memory_occupation", json={})
    call("GET", "/health")
    call("POST", "/resume_memory_occupation", json={"tags": ["weights"]})
    call("POST", "/resume_memory_occupation", json={"tags": ["kv_cache", "cuda_graph"]})
    call("POST", "/continue_generation")
    assert tokens(http) == before
    call("POST", "/pause_generation", json={})
    call("POST", "/release_memory_occupation", json={"tags": ["kv_cache", "weights", "cuda_graph"]})
    call("POST", "/resume_memory_occupation", json={})
    call("POST", "/continue_generation", json={})
    assert tokens(http) == before


def test_areal_with_vllm(http: httpx.Client) -> None:
    before = tokens(http)
    for wakes in (["/wake_up"], ["/wake_up?tags=weights", "/wake_up?tags=kv_cache"]):
        assert http.post("/sleep", json={}).is_success
        assert released(http) == ALL_TAGS
        for wake in wakes:
            assert http.post(wake, json={}).is_success
        assert tokens(http) == before


def test_skyrl_with_query_parameters(http: httpx.Client) -> None:
    before = tokens(http)
    assert http.post("/sleep", params={"level": "1", "tags": ["weights", "kv_cache"]}).is_success
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert http.post("/wake_up", params={"tags": ["weights"]}).is_success
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert http.post("/wake_up", params={"tags": ["kv_cache"]}).is_success
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert tokens(http) == before


def test_skyrl_with_a_json_body(http: httpx.Client) -> None:
    before = tokens(http)
    assert http.post("/sleep", json={"level": 1, "tags": ["weights", "kv_cache"]}).is_success
    assert http.post("/wake_up", json={"tags": ["weights"]}).is_success
    assert http.post("/wake_up", json={"tags": ["kv_cache"]}).is_success
    assert tokens(http) == before


def test_vllm_tooling(http: httpx.Client, weights_folder: str) -> None:
    """All levels: 0 only pauses, 1 keeps the weights, 2 discards them, and the caller writes them again."""
    before = tokens(http)
    assert http.post("/sleep?level=0&mode=keep").is_success
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert released(http) == []
    assert http.post("/release_kv_cache_memory").is_success
    assert released(http) == ["kv_cache"]
    assert http.post("/wake_up", params={"tags": ["kv_cache"]}).is_success
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert tokens(http) == before
    assert http.post("/sleep?level=0").is_success
    assert http.post("/wake_up").is_success
    assert http.post("/sleep?level=2&mode=wait").is_success
    assert http.post("/wake_up?tags=weights").is_success
    assert http.post("/update_weights_from_disk", json={"model_path": weights_folder}).is_success
    assert http.post("/wake_up?tags=kv_cache").is_success
    assert tokens(http) == before
    assert http.post("/sleep?level=4").status_code == 400
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}


def test_tensorrt_llm_tooling(http: httpx.Client) -> None:
    before = tokens(http)
    assert http.get("/memory_status").json() == {"state": "running", "parked_tags": []}
    some = b'{"tags": ["kv_cache", "model", "model_weights"]}'
    for body, parked in ((b"", ALL_TAGS), (b"{}", ALL_TAGS), (some, ["kv_cache", "weights"])):
        response = http.post("/release_memory", content=body)
        assert (response.status_code, response.json()["status"]) == (200, "success")
        assert http.get("/memory_status").json() == {"state": "parked", "parked_tags": parked}
        response = http.post("/resume_memory", content=body)
        assert (response.status_code, response.json()["status"]) == (200, "success")
    assert http.get("/memory_status").json() == {"state": "running", "parked_tags": []}
    assert http.post("/release_memory", json={"tags": ["no such tag"]}).status_code == 400
    assert tokens(http) == before


def test_tensorrt_llm_signatures(serve: Serve) -> None:
    """With a key set, a request is signed: over its body, or over all of it plus a timestamp and a nonce that are
    valid once."""
    server = serve(api_key="control key")

    def digest(signed: bytes) -> str:
        return "sha256=" + hmac.new(b"control key", signed, hashlib.sha256).hexdigest()

    def signed_whole(path: str, body: bytes, timestamp: float) -> dict[str, str]:
        stamp, nonce = str(int(timestamp)), secrets.token_hex(16)
        signed = f"trtllm-runtime-control-v1\nPOST\n{path}\n{stamp}\n{nonce}\n".encode() + body
        return {
            "x-trtllm-runtime-control-auth": digest(signed),
            "x-trtllm-runtime-control-timestamp": stamp,
            "x-trtllm-runtime-control-nonce": nonce,
        }

    body = b'{"tags": ["kv_cache"]}'
    assert server.post("/release_memory", content=body).status_code == 401
    for header in ("x-trtllm-runtime-control-auth", "x-trtllm-rl-control-auth"):
        assert server.post("/release_memory", content=body, headers={header: digest(body)}).status_code == 200
        assert server.post("/release_memory", content=b"{}", headers={header: digest(body)}).status_code == 401
        assert server.get("/memory_status", headers={header: digest(b"")}).json()["parked_tags"] == ["kv_cache"]
    signed = signed_whole("/resume_memory", body, time.time())
    assert server.post("/release_memory", content=body, headers=signed).status_code == 401
    assert server.post("/resume_memory", content=body, headers=signed).status_code == 200
    assert server.post("/resume_memory", content=body, headers=signed).status_code == 401
    for sign in (signed_whole("/release_memory", body, time.time()), {"x-trtllm-rl-control-auth": digest(body)}):
        assert server.post("/release_memory?mode=abort&hibernate=true", content=body, headers=sign).status_code == 401
        replayed = {**sign, "Idempotency-Key": "that of another"}
        assert server.post("/release_memory", content=body, headers=replayed).status_code == 401
        assert server.post("/release_memory", content=body, headers=sign).status_code == 200
    late = signed_whole("/resume_memory", body, time.time() - 3600)
    assert server.post("/resume_memory", content=body, headers=late).status_code == 401
    assert server.post("/resume_memory", headers={"authorization": "Bearer control key"}).status_code == 200


def test_an_operator_with_curl(http: httpx.Client) -> None:
    """curl -X POST sends no body, length or content type; GET works as well."""
    before = tokens(http)
    address = urlsplit(str(http.base_url))
    for method in ("POST", "GET"):
        for path in ("/release_memory_occupation", "/resume_memory_occupation"):
            connection = http_connection(address.hostname, address.port)
            connection.putrequest(method, path)
            connection.endheaders()
            response = connection.getresponse()
            assert response.status == 200
            assert json.loads(response.read())["message"].startswith(("released", "resumed"))
            connection.close()
    assert tokens(http) == before


def http_connection(host: str | None, port: int | None) -> http.client.HTTPConnection:
    assert host is not None
    return http.client.HTTPConnection(host, port, timeout=600)
