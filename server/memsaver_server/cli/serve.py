"""``memsaver serve``: the reference engine and the service, in one process."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from rich.text import Text

from memsaver_server.cli.options import Options, grouped, size_of
from memsaver_server.cli.serving import Listening, end_at_once, settings_of, starting, until_ended
from memsaver_server.cli.tables import make_console, plain
from memsaver_server.cli.units import format_seconds

if TYPE_CHECKING:
    import torch


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers; write for example 1,2,4") from None


def _dtype(name: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise typer.BadParameter(f"{name!r} is not an element type of torch; write for example bfloat16")
    return dtype


class EngineOptions(Options):
    """The arguments of ``TransformersEngine``, with its defaults."""

    convert: ClassVar = {"kv_cache_bytes": size_of, "batch_sizes": _numbers, "dtype": _dtype}

    model: Path | None = typer.Option(
        None,
        help="Checkpoint folder: config.json and safetensors. Default: a small built-in Qwen2.",
        exists=True,
        show_default=False,
    )
    random_weights: Path | None = typer.Option(
        None,
        help="Serve a model of this config.json with random weights.",
        metavar="CONFIG.json",
        exists=True,
        show_default=False,
    )
    enforce_eager: bool = typer.Option(False, "--enforce-eager", help="Run without CUDA graphs.")
    kv_cache_bytes: str | None = typer.Option(
        None, help="Size of the KV cache, e.g. 4GiB [1GiB on a GPU, else 64MiB].", metavar="SIZE"
    )
    max_len: int | None = typer.Option(
        None, help="Tokens of prompt and answer per request [2048 on a GPU, else 512].", min=2
    )
    batch_sizes: str = typer.Option(
        "1,2,4,8,16,32,64", help="Decode batch sizes; on a GPU a CUDA graph is captured for each.", metavar="N,N,..."
    )
    tensor_parallel: int = typer.Option(
        1, help="Processes among which the model is divided, each on a device.", metavar="N", min=1
    )
    dtype: str | None = typer.Option(None, help="Element type, e.g. bfloat16 [the checkpoint's].", show_default=False)
    seed: int = typer.Option(0, help="Seed of random weights.")


@grouped
def serve(
    options: EngineOptions,
    at: Listening,
    while_released: Annotated[
        str | None,
        typer.Option(help="Requests that arrive while memory is released: refuse or queue [refuse].", metavar="WHAT"),
    ] = None,
    verify_tokens: Annotated[
        bool, typer.Option("--verify-tokens", help="Compare tokens before each release and after the resume.")
    ] = False,
) -> None:
    """Serve a causal language model with POST /generate, and release and resume its memory on request.

    MEMSAVER_* variables set the other settings of the service. SIGTERM and SIGINT end it with exit code 0.
    """
    began = time.monotonic()
    with starting("engine"):
        console = make_console(stderr=True)
        given = options.given()
        settings = settings_of(while_released=while_released, verify_tokens=verify_tokens)
        from memsaver_server import audit
        from memsaver_server.attachment import GRACE_S, attach, check_place

        check_place(at.host, at.port, at.uds, settings)
        # It imports transformers, which takes seconds; what is refused above is refused sooner.
        from memsaver_server.reference.engine import TransformersEngine

        engine = TransformersEngine(**given)
        attachment = attach(engine, settings=settings, **vars(at))
    try:
        with until_ended():
            audit.to_stderr()
            # torch and transformers load 350,000 objects: a full garbage collection would block all requests for 0.2 s.
            gc.collect()
            gc.freeze()
            # One line on stdout, from which a caller learns the address if the port is 0.
            typer.echo(f"serving {engine.model_name} on {attachment.url}")
            about = ", ".join(f"{name} {value}" for name, value in engine.describe().items() if name != "model")
            ready = f"ready after {format_seconds(time.monotonic() - began)}: "
            console.print(Text.assemble(ready, plain(about), style="dim"))
        console.print("ending", style="dim")
    finally:
        # A thread that waits for a frozen rank would keep the process from ending.
        late = threading.Timer(GRACE_S, engine.end_waits)
        late.daemon = True
        late.start()
        attachment.close()
        failed = not engine.is_alive()
        engine.close()
        late.cancel()
        end_at_once(failed=failed)
