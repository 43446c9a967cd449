"""tokenspeed's engine process (``program.py``), seen from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import grpc
import httpx
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as messages
from smg_grpc_proto.generated.tokenspeed_scheduler_pb2_grpc import TokenSpeedSchedulerStub

from tests.sglang.server import free_port, prompts
from tests.waiting import wait_until

ARGUMENTS = (
    "--host", "127.0.0.1", "--enable-memory-saver", "--attention-backend", "triton", "--sampling-backend", "greedy",
    "--grammar-backend", "none", "--disable-kvstore", "--max-model-len", "4096", "--max-num-seqs", "32",
)  # fmt: skip
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "MEMSAVER_DRIVER": "host",
    "MEMSAVER_HOST_CAPACITY": str(1 << 30),
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
START_S = 240.0
PROMPT = [5, 17, 60, 2]
T = TypeVar("T")


def write_model(folder: Path) -> Path:
    """Write what tokenspeed reads of a model without its weights."""
    shape = {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 1024, "max_position_embeddings": 4096,
    }  # fmt: skip
    kind = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps({**kind, **shape, "eos_token_id": 1, "rms_norm_eps": 1e-6}))
    words = {"type": "WordLevel", "vocab": {f"w{each}": each for each in range(1024)}, "unk_token": "w0"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": words}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


class Server:
    """Its calls: ``own`` tokenspeed's endpoints, ``service`` memsaver's."""

    def __init__(self, model: Path, log: Path, *arguments: str, serve: bool = True, **environment: str) -> None:
        self.log = log
        grpc_port, self._own_port, self._service_port = free_port(), free_port(), free_port()
        named = {"MEMSAVER_TOKENSPEED": f"127.0.0.1:{self._service_port}"} if serve else {}
        ports = ["--port", str(grpc_port), "--rl-control-port", str(self._own_port)]
        command = [sys.executable, "-m", "tests.tokenspeed.program", "--model", str(model), *ARGUMENTS, *ports]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, *(arguments or ("--no-enable-prefix-caching",))],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, **named, "RENDEZVOUS_PORT": str(free_port()), **environment},
                start_new_session=True,
            )
        self.http = httpx.Client(timeout=120)
        self._threads = ThreadPoolExecutor(32)
        self._address = f"127.0.0.1:{grpc_port}"

    def wait_until_up(self) -> None:
        wait_until(lambda: self.is_dead() or "gRPC server is ready" in self.output(), START_S)
        assert not self.is_dead(), self.output()[-5000:]

    def is_dead(self) -> bool:
        return self.process.poll() is not None or "Scheduler hit an exception" in self.output()

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def own(self, path: str, body: dict[str, Any] | None = None, *, status: int = 200) -> Any:
        answer = self.http.post(f"http://127.0.0.1:{self._own_port}{path}", json=body or {})
        assert answer.status_code == status, (answer.status_code, answer.text)
        return answer.json()

    def service(self, path: str, body: dict[str, Any] | None = None, *, status: int = 200) -> Any:
        answer = self.http.post(f"http://127.0.0.1:{self._service_port}{path}", json=body or {})
        assert answer.status_code == status, (answer.status_code, answer.text)
        return answer.json()

    def get(self, path: str) -> httpx.Response:
        return self.http.get(f"http://127.0.0.1:{self._service_port}{path}")

    def tags(self) -> dict[str, str]:
        """The state of each tag, by the service."""
        return {each["tag"]: each["state"] for each in self.get("/memory_occupation").json()["tags"]}

    def generate(self, length: int = 16, prompt: list[int] | None = None, begun: Event | None = None) -> list[int]:
        """Return the tokens that tokenspeed's gRPC server answers; set ``begun`` at the first one.

        Raises:
            grpc.RpcError: the server ended the request.
        """
        request = messages.GenerateRequest(
            request_id=uuid.uuid4().hex,
            tokenized=messages.TokenizedInput(input_ids=prompt or PROMPT, original_text="w"),
            sampling_params=messages.SamplingParams(temperature=0.0, max_new_tokens=length, ignore_eos=True),
            stream=True,
        )
        tokens: list[int] = []
        with grpc.insecure_channel(self._address) as channel:
            for answer in TokenSpeedSchedulerStub(channel).Generate(request, timeout=120):
                tokens.extend(answer.chunk.token_ids)
                if begun is not None:
                    begun.set()
        return tokens

    def is_healthy(self) -> bool:
        """By the health check of tokenspeed's gRPC server, which asks the scheduler."""
        with grpc.insecure_channel(self._address) as channel:
            answer = TokenSpeedSchedulerStub(channel).HealthCheck(messages.HealthCheckRequest(), timeout=60)
        return bool(answer.healthy)

    def in_background(self, count: int, length: int) -> list[Future[list[int]]]:
        """Start requests with the prompts of ``prompts``; return once each has its first token."""
        begun = [Event() for _ in range(count)]
        started = [
            self._threads.submit(self.generate, length, prompt, event)
            for prompt, event in zip(prompts(count), begun, strict=True)
        ]
        assert all(event.wait(60) for event in begun)
        return started

    def later(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        return self._threads.submit(call, *arguments)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        self.http.close()
