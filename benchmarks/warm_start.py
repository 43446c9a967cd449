"""A warm start: seconds until the weights of Qwen3-8B's shape are on the device from the shared store, beside a load of
the same weights from safetensors in the page cache.

Each start is a process of its own; the time is of the load alone, with the model made and the context open. A keeper
holds the weights between the starts. The content is compared after each.
``--engines``: seconds from the start of a server's process to its first token, by load format: ``dummy`` loads nothing,
``auto`` loads safetensors from the page cache, ``memsaver`` takes the weights from the store.

    python benchmarks/warm_start.py                     # needs 35 GiB of disk and 40 GiB of host memory
    python benchmarks/warm_start.py --config tests/data/qwen2-1.5b/config.json --repeats 3 --out /tmp
    python benchmarks/warm_start.py --engines sglang vllm --repeats 2
    MEMSAVER_DRIVER=host python benchmarks/warm_start.py --config CONFIG.json --repeats 1 --out /tmp
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import _sglang_server
import torch
from _checkpoint import PROMPTS, write_checkpoint
from _http_engines import ask, vllm
from _http_engines import started as served
from _record import ROOT, new_parser, new_result, write

from memsaver_core.manifests import keeper_command

ON_GPU = torch.cuda.is_available() and os.environ.get("MEMSAVER_DRIVER") != "host"
CONFIG = ROOT / "tests" / "data" / "qwen3-8b" / "config.json"


def start(folder: Path) -> dict[str, Any]:
    """Make the model on the device, then load its weights as this process's settings say."""
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM

    import memsaver_core as ms

    device = ms.torch_device()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.tie_weights()
    moved: dict[int, torch.Tensor] = {}
    with ms.region("weights"):
        model._apply(lambda tensor: moved.setdefault(id(tensor), torch.empty_like(tensor, device=device)))
    moved.clear()
    model.tie_weights()

    def load() -> None:
        own = model.state_dict()
        with safe_open(folder / "model.safetensors", "pt", device=str(device)) as file, torch.no_grad():
            for name in sorted(file.keys()):
                own[name].copy_(file.get_tensor(name))

    def wait() -> None:
        if ON_GPU:
            torch.cuda.synchronize()

    wait()
    begin = time.perf_counter()
    key = ms.WeightsKey(str(folder), ms.revision_of(folder))
    reason = ms.load_weights(key, lambda: dict(model.named_parameters()), load)
    wait()
    seconds = time.perf_counter() - begin
    own = model.state_dict()
    sums = [float(tensor.double().sum()) for tensor in own.values()]
    nbytes = sum(tensor.nbytes for tensor in own.values())
    return {"seconds": seconds, "reason": reason, "bytes": nbytes, "sums": sums}


def started(folder: Path, store: str) -> dict[str, Any]:
    environment = {**os.environ, "MEMSAVER_SHARED_BACKUPS": store}
    ran = subprocess.run(
        [sys.executable, __file__, "--start", str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answer


def first_token(engine: str, load_format: str, folder: Path, logs: Path) -> float:
    """Start a server; return the seconds until its first token."""
    begin = time.perf_counter()
    more = ("--load-format", load_format)
    if engine == "vllm":
        kind = vllm(str(folder), 0.6, PROMPTS[0], 1, *more)
        with served(kind, engine, logs) as client:
            first, _ = ask(client, kind.path, {**kind.body, "model": engine})
            log = (logs / f"{engine}.log").read_text()
    else:
        arguments = ["--attention-backend", "triton", "--mem-fraction-static", "0.6", *more]
        with _sglang_server.started("service", folder, None, arguments) as server:
            server.wait_until_up()
            server.generate(PROMPTS[0], 1)
            first, log = time.perf_counter(), server.output()
    if load_format == "memsaver" and "loaded in the ordinary way" in log:
        raise RuntimeError(f"{engine} took no weights from the store:\n{log[-3000:]}")
    return first - begin


def starts(engine: str, folder: Path, store: str, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each load format."""
    os.environ["MEMSAVER_SHARED_BACKUPS"] = store
    found: dict[str, list[float]] = {"dummy": [], "auto": [], "memsaver": []}
    with tempfile.TemporaryDirectory() as logs:
        with suppress(RuntimeError):  # the store has none of this engine's; kernels are compiled now
            first_token(engine, "memsaver", folder, Path(logs))
        for _ in range(repeats):
            for load_format, seconds in found.items():
                seconds.append(first_token(engine, load_format, folder, Path(logs)))
                print(engine, load_format, seconds[-1], file=sys.stderr, flush=True)
    return found


def to_markdown(result: dict[str, Any]) -> str:
    lines = [
        f"# Warm start: {result['model']}, {result['device']}, torch {result['torch']}",
        "",
        f"{result['date']}, `{result['command']}`. {result['bytes'] / 1e9:.1f} GB of bfloat16 weights; seconds until "
        "they are on the device, median (fastest to slowest), in a new process each time. All weights from the store "
        "were compared with their digests.",
        "",
        "| weights from | seconds | GB/s |",
        "|---|---|---|",
    ]
    for name, seconds in result["seconds"].items():
        median = statistics.median(seconds)
        rate = result["bytes"] / 1e9 / median
        lines.append(f"| {name} | {median:.2f} ({min(seconds):.2f} to {max(seconds):.2f}) | {rate:.1f} |")
    for engine, found in result["engines"].items():
        lines += ["", f"Seconds from the start of {engine}'s process to its first token:", ""]
        lines += ["| load format | median | each |", "|---|---|---|"]
        lines += [
            f"| {name} | {statistics.median(all_of):.2f} | {', '.join(f'{each:.2f}' for each in all_of)} |"
            for name, all_of in found.items()
        ]
    return "\n".join([*lines, ""])


def main() -> None:
    if sys.argv[1:2] == ["--start"]:
        print(json.dumps(start(Path(sys.argv[2]))))
        return
    parser = new_parser(__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG, help="config.json of the model's shape")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engines", nargs="+", choices=["sglang", "vllm"], default=[])
    options = parser.parse_args()
    store = f"benchmark-{uuid4().hex[:12]}"
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as written:
        folder = Path(written)
        write_checkpoint(options.config, folder)
        limit = (3 + 2 * len(options.engines)) * (folder / "model.safetensors").stat().st_size
        keeper = subprocess.Popen(keeper_command(store, limit, limit), stdout=subprocess.DEVNULL)
        try:
            expected = started(folder, "")["sums"]  # and the file is in the page cache
            ways = {
                "safetensors in the page cache": ("", options.repeats),
                "safetensors, and given to the store": (store, 1),
                "the shared store": (store, options.repeats),
            }
            for way, (name, repeats) in ways.items():
                for _ in range(repeats):
                    run = started(folder, name)
                    if run["sums"] != expected or (not run["reason"]) != (way == "the shared store"):
                        raise RuntimeError(f"{way}: other weights, or {run['reason'] or 'loaded from the store'}")
                    seconds.setdefault(way, []).append(run["seconds"])
            engines = {engine: starts(engine, folder, store, options.repeats) for engine in options.engines}
        finally:
            keeper.terminate()
            keeper.wait()
    result = {
        **new_result("warm_start.py"),
        "model": options.config.parent.name,
        "device": torch.cuda.get_device_name(0) if ON_GPU else "host driver",
        "torch": torch.__version__,
        "bytes": run["bytes"],
        "seconds": seconds,
        "engines": engines,
    }
    print(write("warm-start", result, to_markdown, options.out))


if __name__ == "__main__":
    main()
