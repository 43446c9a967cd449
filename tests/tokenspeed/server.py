"""tokenspeed's engine process (``program.py``), seen from outside."""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path
from threading import Event
from typing import Any

import grpc
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as messages
from smg_grpc_proto.generated.tokenspeed_scheduler_pb2_grpc import TokenSpeedSchedulerStub

from tests.engine_server import PROMPT, EngineServer, free_port

ARGUMENTS = (
    "--host", "127.0.0.1", "--enable-memory-saver", "--attention-backend", "triton", "--sampling-backend", "greedy",
    "--grammar-backend", "none", "--disable-kvstore", "--max-model-len", "4096", "--max-num-seqs", "32",
)  # fmt: skip
NO_PREFIXES = "--disable-prefix-caching"
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "MEMSAVER_DRIVER": "host",
    "MEMSAVER_HOST_CAPACITY": str(1 << 30),
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


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


class Server(EngineServer):
    ready = "gRPC server is ready"
    answer_s, first_token_s = 120.0, 60.0

    def __init__(self, model: Path, log: Path, *arguments: str, serve: bool = True, **environment: str) -> None:
        super().__init__(log)
        grpc_port = free_port()
        self._address = f"127.0.0.1:{grpc_port}"
        named = {"MEMSAVER_TOKENSPEED": self.service_url.removeprefix("http://")} if serve else {}
        ports = ["--port", str(grpc_port), "--rl-control-port", self.url.rpartition(":")[2]]
        command = [sys.executable, "-m", "tests.tokenspeed.program", "--model", str(model), *ARGUMENTS, *ports]
        self.run(
            [*command, *(arguments or (NO_PREFIXES,))],
            {**ENVIRONMENT, **named, "RENDEZVOUS_PORT": str(free_port()), **environment},
        )

    def own(self, path: str, body: dict[str, Any] | None = None, *, status: int = 200) -> Any:
        return super().own(path, body, status=status).json()

    def write_weights(self, status: int = 200, name: str = "weight", **more: Any) -> Any:
        body = {"names": [name], "dtypes": ["int64"], "shapes": [[1]], **more}
        return self.own("/update_weights_from_distributed", body, status=status)

    def stream(self, length: int, prompt: list[int], begun: Event) -> list[int]:
        return self.generate(length, prompt, begun)

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
