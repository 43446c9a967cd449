"""A real SGLang server in separate processes; here on its CPU engine, with memsaver's host driver."""

from __future__ import annotations

import base64
import json
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

import httpx
import psutil
from safetensors.torch import load_file

from tests.engine_server import PROMPT, EngineServer

ARGUMENTS = (
    "--skip-tokenizer-init", "--sampling-backend", "pytorch", "--grammar-backend", "none", "--enable-memory-saver",
    "--max-total-tokens", "16384", "--context-length", "4096", "--host", "127.0.0.1",
)  # fmt: skip
CPU = (
    "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--mem-fraction-static", "0.3",
    "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled",
)  # fmt: skip
#: How long an answer may take on a machine that does other work, seconds.
ANSWER_S = 240.0
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "MEMSAVER_DRAIN_TIMEOUT_S": str(ANSWER_S),
    "MEMSAVER_DRIVER": "host",
    "MEMSAVER_HOST_CAPACITY": str(2 << 30),
    "OMP_NUM_THREADS": "1",
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
    "SGLANG_USE_CPU_ENGINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


def source(path: str) -> str:
    """The source of the installed SGLang."""
    found = find_spec("sglang")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "srt" / path).read_text()


def binds_all_ranks() -> bool:
    """Whether SGLANG_CPU_OMP_THREADS_BIND lists processors for all ranks. Older versions expect those of one pipeline
    stage of one replica."""
    return "dp_size" in source("utils/numa_utils.py")


class Server(EngineServer):
    ready = "fired up and ready"
    answer_s = first_token_s = ANSWER_S
    arguments: ClassVar[tuple[str, ...]] = (*ARGUMENTS, *CPU)
    environment: ClassVar[dict[str, str]] = ENVIRONMENT

    def __init__(self, model: Path, log: Path, *arguments: str, serve: bool = True, **environment: str) -> None:
        super().__init__(log)
        self.model = model
        named = {"MEMSAVER_SGLANG": self.service_url.removeprefix("http://")} if serve else {}
        port = self.url.rpartition(":")[2]
        launch = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *self.arguments]
        self.command = [*launch, "--port", port, *arguments]
        self.run(self.command, {**self.environment, **named, **environment})

    def write_weights(self, status: int = 200, **fields: Any) -> httpx.Response:
        """Have SGLang write the weights of its model again."""
        return self.own("/update_weights_from_disk", {"model_path": str(self.model), **fields}, status=status)

    def write_tensors(self, model: Path | None = None, ranks: int = 1, **fields: Any) -> httpx.Response:
        """As ``write_weights``, from tensors in the request, of which each rank takes its part."""
        weights = list(load_file((model or self.model) / "model.safetensors").items())
        content = base64.b64encode(pickle.dumps(weights)).decode()
        with self.writing():
            return self.own("/update_weights_from_tensor", {"serialized_named_tensors": [content] * ranks, **fields})

    @contextmanager
    def writing(self) -> Iterator[None]:
        """What newer versions want around the requests of an update, unless it is from disk."""
        sessions = "/begin_weight_update" in source("entrypoints/http_server.py")
        if sessions:
            self.own("/begin_weight_update")
        yield
        if sessions:
            self.own("/end_weight_update")

    def request(self, length: int = 16, prompt: list[int] | None = None, **fields: Any) -> httpx.Response:
        parameters = {"max_new_tokens": length, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt or PROMPT, "sampling_params": parameters, **fields}
        return self.http.post(self.url + "/generate", json=body)

    def generate(self, length: int = 16, prompt: list[int] | None = None, **fields: Any) -> list[int]:
        answer = self.request(length, prompt, **fields)
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["output_ids"]
        return tokens

    def stream(self, length: int, prompt: list[int], begun: Event) -> list[int]:
        """As ``generate``; sets ``begun`` at the first token."""
        parameters = {"max_new_tokens": length, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": parameters, "stream": True}
        tokens: list[int] = []
        with self.http.stream("POST", self.url + "/generate", json=body) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    tokens = chunk["output_ids"]
                    begun.set()
        return tokens

    def check_cycles(self, answers: Callable[[], Any]) -> None:
        """Release and resume everything, by SGLang's own call and by the service; ``answers()`` must stay the same."""
        expected = answers()
        for call in (self.own, self.service):
            for _ in range(3):
                call("/release_memory_occupation")
                assert set(self.tags().values()) == {"released"}
                call("/resume_memory_occupation")
                assert answers() == expected, self.output()[-3000:]

    def check_updates_while_released(self, other: Path, ranks: int = 1) -> None:
        """Weights that are released with a backup are written in host memory, and brought in by the resume; after an
        update that fails the resume brings in what they were. ``other`` is a checkpoint with other weights."""
        expected = self.generate()
        writes: list[Callable[[Path, str], Any]] = [
            lambda model, version: self.write_weights(model_path=str(model), weight_version=version),
            lambda model, version: self.write_tensors(model, ranks, weight_version=version),
        ]
        written = []
        for write in writes:
            for model in (other, self.model):
                self.service("/release_memory_occupation")
                write(model, f"step-{len(written)}")
                assert set(self.tags().values()) == {"released"}
                self.service("/resume_memory_occupation", {"weights_version": "another"}, status=409)
                resumed = self.service("/resume_memory_occupation", {"weights_version": f"step-{len(written)}"})
                assert resumed["weights_version"] == f"step-{len(written)}"
                written.append(self.generate())
        new = written[0]
        assert new != expected
        assert written == [new, expected] * 2
        self.own("/release_memory_occupation")
        self.write_weights(400, model_path=str(other / "missing"), weight_version="missing")
        self.own("/resume_memory_occupation")
        assert self.generate() == expected
        assert self.version() == f"step-{len(written) - 1}"
        self.write_weights(model_path=str(other))
        assert self.version() is None
        self.write_weights(weight_version="last")
        assert self.version() == "last"

    def version(self) -> str | None:
        """Of the weights, by the service."""
        held: str | None = self.get("/memory_occupation").json()["weights_version"]
        return held

    def schedulers(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in children if each.cmdline()[0].startswith("sglang::scheduler")]
