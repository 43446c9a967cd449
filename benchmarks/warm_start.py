"""A warm start: seconds until the weights of Qwen3-8B's shape are on the device from the shared store, beside a load of
the same weights from safetensors in the page cache.

Each start is a process of its own; the time is of the load alone, with the model made and the context open. A keeper
holds the weights between the starts. The content is compared after each.

    python benchmarks/warm_start.py                     # needs 35 GiB of disk and 40 GiB of host memory
    python benchmarks/warm_start.py --config tests/data/qwen2-1.5b/config.json --repeats 3 --out /tmp
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
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from _checkpoint import write_checkpoint
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
    model.tie_weights()
    own = model.state_dict()

    def load() -> None:
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
    return "\n".join([*lines, ""])


def main() -> None:
    if sys.argv[1:2] == ["--start"]:
        print(json.dumps(start(Path(sys.argv[2]))))
        return
    parser = new_parser(__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG, help="config.json of the model's shape")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    store = f"benchmark-{uuid4().hex[:12]}"
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as written:
        folder = Path(written)
        write_checkpoint(options.config, folder)
        limit = 3 * (folder / "model.safetensors").stat().st_size
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
    }
    print(write("warm-start", result, to_markdown, options.out))


if __name__ == "__main__":
    main()
