"""Serves one small engine with a model, in a process of its own, until standard input ends.

Arguments: the model, and its size in MiB. Prints a line when it can allocate its memory, does so once it is told to,
and prints its address. ``POST /v1/completions`` takes ``{"model", "prompt": [numbers], "max_tokens", "stream"}``, and
``hold``: then it stops after its first token until a line ``go`` comes on standard input. So does an update of its
weights, which it also writes asleep. ``GET /v1/seen`` counts the requests by what became of them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

import memsaver_core as ms
from memsaver_server import Gate, Settings, create_app
from memsaver_server.attachment import serve_app

MIB = 1 << 20


class Engine(Gate):
    """A gate with weights; each token is one of them."""

    updates_asleep = True

    def __init__(self, model: str, size: int) -> None:
        super().__init__(f"engine of {model}")
        self.model_name = model
        with ms.region("weights", restore="host"):
            self.weights = torch.empty(size // 8, dtype=torch.int64, device=ms.torch_device())
        self.weights.copy_(torch.arange(size // 8) * 7 % 997 + sum(model.encode()))
        self.seen: Counter[str] = Counter()
        self.go = threading.Event()

    def update_weights_from_disk(self, _: object, **__: object) -> int:
        self.go.wait()
        self.weights.add_(1)
        return 1

    update_weights_from_tensor = update_weights_from_disk

    async def tokens(self, asked: dict[str, Any]) -> AsyncIterator[int]:
        inside = self.request()
        await asyncio.to_thread(inside.__enter__)
        self.seen["begun"] += 1
        try:
            for number in range(asked.get("max_tokens", 4)):
                yield int(self.weights[(sum(asked["prompt"]) + number) % len(self.weights)])
                while asked.get("hold") and not self.go.is_set():
                    await asyncio.sleep(0.005)
            self.seen["ended"] += 1
        except (asyncio.CancelledError, GeneratorExit):
            self.seen["cancelled"] += 1
            raise
        finally:
            inside.__exit__(None, None, None)


def with_completions(engine: Engine) -> FastAPI:
    app = create_app(engine, Settings())

    @app.get("/v1/seen")
    async def seen() -> dict[str, int]:
        return dict(engine.seen)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked = await request.json()
        tokens = engine.tokens(asked)
        first = await anext(tokens)  # a closed gate refuses here
        if asked.get("stream"):
            return StreamingResponse(_events(first, tokens), media_type="text/event-stream")
        return JSONResponse({"model": engine.model_name, "tokens": [first, *[token async for token in tokens]]})

    return app


async def _events(first: int, tokens: AsyncIterator[int]) -> AsyncIterator[str]:
    try:
        yield f"data: {json.dumps({'token': first})}\n\n"
        async for token in tokens:
            yield f"data: {json.dumps({'token': token, 'text': 'é'})}\n\n"
        yield "data: [DONE]\n\n"
    finally:
        await tokens.aclose()  # type: ignore[attr-defined]


def main(model: str, mib: str) -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    engine = Engine(model, int(mib) * MIB)
    with serve_app(partial(with_completions, engine), Settings()) as attachment:
        print(attachment.url, flush=True)
        for line in sys.stdin:
            engine.go.set() if line.strip() == "go" else engine.go.clear()
            print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
