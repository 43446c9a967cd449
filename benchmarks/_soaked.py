"""The engine of `soak.py`: the reference engine, served, with separate marks in the memory of each tag.

Prints its address. Then it answers each line of standard input by a line of JSON, until that ends:

    mark SEED    writes new marks; answers {"sums": {tag: checksum}}
    look         {"sums": {tag: checksum}, "zero": [tags whose marks are all zero], "model": checksum of the weights,
                 "threads": names of Python's threads}

It is asked only while everything is resident and no operation is under way. The checksums are torch's arithmetic, not
the digests by which the core itself decides what to copy.
"""

from __future__ import annotations

import json
import sys
import threading

import torch

import memsaver_core as ms
from memsaver_server import attach
from memsaver_server.reference.engine import TransformersEngine

#: Words of 8 bytes that are summed at once.
BLOCK = 4 << 20

#: Tags whose content no release of the soak gives up: their marks change in part only, as trained weights do.
KEPT = ("weights", "cuda_graph", "disk")


class Checksum:
    """The sum of all words, each times an odd number of its place: one changed word, or two swapped, change it."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator(device=device).manual_seed(1)
        self._factors = torch.empty(BLOCK, dtype=torch.int64, device=device).random_(generator=generator) * 2 + 1

    def __call__(self, storages: list[torch.UntypedStorage]) -> torch.Tensor:
        sums = []
        for storage in storages:
            words = torch.empty(0, dtype=torch.int64, device=storage.device).set_(storage, 0, (storage.nbytes() // 8,))
            sums += [(block * self._factors[: block.numel()]).sum() for block in words.split(BLOCK)]
        return torch.stack(sums)


class Weights:
    """The model's checksum; on a GPU by a separate graph, captured once: what it reads has to stay where it is."""

    def __init__(self, model: torch.nn.Module, checksum: Checksum) -> None:
        storages = {tensor.data_ptr(): tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())}
        self._run = lambda: checksum(list(storages.values()))
        self._graph: torch.cuda.CUDAGraph | None = None
        if next(iter(storages.values())).device.type == "cuda":
            self._run()
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._sums = self._run()

    def sums(self) -> list[int]:
        if self._graph is None:
            return self._run().tolist()
        self._graph.replay()
        return self._sums.tolist()


class Marks:
    def __init__(self, device: torch.device, nbytes: int, checksum: Checksum) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for tag in ("weights", "kv_cache", "workspace", "cuda_graph"):
            with ms.region(tag):
                self._tensors[tag] = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        with ms.region("disk", restore="file"):
            self._tensors["disk"] = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._generator = torch.Generator(device=device)
        self._checksum = checksum

    def write(self, seed: int) -> None:
        self._generator.manual_seed(seed)
        for tag, tensor in self._tensors.items():
            part = tensor.chunk(3)[seed % 3] if tag in KEPT else tensor
            part.random_(0, 256, generator=self._generator)

    def sums(self) -> dict[str, list[int]]:
        sums = torch.stack([self._checksum([tensor.untyped_storage()]) for tensor in self._tensors.values()])
        return dict(zip(self._tensors, sums.tolist(), strict=True))

    def zero(self) -> list[str]:
        content = torch.stack([tensor.any() for tensor in self._tensors.values()])
        return [tag for tag, any_ in zip(self._tensors, content.tolist(), strict=True) if not any_]


def main() -> None:
    config, kv_cache_bytes, mark_bytes = sys.argv[1:4]
    engine = TransformersEngine(random_weights=config or None, kv_cache_bytes=int(kv_cache_bytes) or None)
    with torch.no_grad(), attach(engine) as attachment:
        checksum = Checksum(engine.device)
        weights = Weights(engine.runner.model, checksum)
        marks = Marks(engine.device, int(mark_bytes), checksum)
        print(attachment.url, flush=True)
        for line in sys.stdin:
            order, *arguments = line.split()
            if order == "mark":
                marks.write(int(arguments[0]))
                answer: dict[str, object] = {"sums": marks.sums()}
            else:
                names = sorted(thread.name for thread in threading.enumerate())
                answer = {"sums": marks.sums(), "zero": marks.zero(), "model": weights.sums(), "threads": names}
            print(json.dumps(answer), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
