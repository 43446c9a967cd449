"""A process that loads weights by the public API, and does what it is told: ``warm_engine``.

Each line of JSON on its standard input is what it does, ``[operation, argument]``, and is answered by a line of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import memsaver_core as ms
from memsaver_core import process, updates

KEY = {"model": "a model", "revision": "r1", "dtype": "float32"}
ELEMENTS = 300_000  # of each of three tensors, of which two share memory


class Engine:
    def __init__(self) -> None:
        self.loads = 0
        with ms.region("weights"):
            self.first = torch.nn.Parameter(torch.zeros(ELEMENTS), requires_grad=False)
            self.tied = self.first[: ELEMENTS // 2]
            self.zeros = torch.full((5000,), 7.0)
            self.last = torch.empty_strided((100, 2 * ELEMENTS // 100), (1, 100))

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"first": self.first, "tied": self.tied, "zeros": self.zeros, "last": self.last}

    def load(self, given: dict[str, Any]) -> list[Any]:
        """Return why it loaded, how often, and the content's sum; with ``hold`` it says "loading" and waits first."""
        hold, seed = given.pop("hold", False), given.pop("seed", 1)

        def load() -> None:
            if hold:
                print(json.dumps("loading"), flush=True)
                sys.stdin.readline()
            self.loads += 1
            self.first.copy_(torch.arange(ELEMENTS) * seed + 0.5)
            self.zeros.zero_()
            self.last.copy_(torch.arange(2 * ELEMENTS).view(100, -1) + seed)

        reason = ms.load_weights(ms.WeightsKey(**{**KEY, **given}), self.tensors, load)
        return [reason, self.loads, self.sums()]

    def update(self, given: dict[str, Any]) -> int:
        """Write other weights while these are released, if the store has them not. Return how often it has loaded."""
        with updates.written_asleep("weights", ms.WeightsKey("an update", given["revision"])):
            if "weights" not in updates.filled_tags:
                if given.get("more"):
                    self.more.add_(1)
                self.loads += 1
                self.first.copy_(torch.arange(ELEMENTS) + given.get("begin", 0.25))
                self.last.mul_(3)
        return self.loads

    def sums(self) -> list[float]:
        return [float(each.double().sum()) for each in self.tensors().values()]

    def do(self, operation: str, argument: Any) -> Any:
        if operation == "load":
            return self.load(argument)
        if operation == "release":
            return ms.release().tags[0].model_dump()
        if operation == "resume":
            ms.resume()
            return self.sums()
        if operation == "write":  # as a trainer's update does
            self.first.fill_(argument)
            return self.sums()
        if operation == "update":
            return self.update(argument)
        if operation == "more":
            with ms.region("weights"):
                self.more = torch.ones(ELEMENTS)
            return None
        if operation == "view":  # the first time, a tensor that the loader does not know
            self.view = getattr(self, "view", self.first[:7])
            return self.view.tolist()
        if operation == "hold":
            saver: Any = process.saver()
            saver.delay(argument, 3600)
            return None
        if operation == "status":
            store = ms.status().host_backup.shared_store
            assert store is not None
            return store.model_dump()
        raise ValueError(operation)


def main() -> None:
    engine = Engine()
    while line := sys.stdin.readline():
        print(json.dumps(engine.do(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
