"""New weights for an engine that sleeps: seconds from "the trainer is done" to the first token of the new weights.

The reference engine of Qwen3-8B's shape, over HTTP, with two checkpoints in turn. "Done": a checkpoint is on disk, and
the device is free. Either the engine resumes its weights, updates them from disk and resumes the rest; or it
has updated them while it slept, beside the end of the training, and only resumes. A wake-up without an update stands
beside them. The tokens of each checkpoint are the same, however it came.

    python benchmarks/sleeping_update.py                # needs 35 GiB of disk and 80 GiB of host memory
    python benchmarks/sleeping_update.py --config tests/data/qwen2-1.5b/config.json --repeats 3 --out /tmp
    MEMSAVER_DRIVER=host python benchmarks/sleeping_update.py --config CONFIG.json --repeats 1 --out /tmp
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _checkpoint import write_checkpoint
from _record import ROOT, new_parser, new_result, write

from memsaver_server import attach
from memsaver_server.client import Client
from memsaver_server.reference.engine import TransformersEngine

ON_GPU = torch.cuda.is_available() and os.environ.get("MEMSAVER_DRIVER") != "host"
CONFIG = ROOT / "tests" / "data" / "qwen3-8b" / "config.json"
PROMPT = [number * 31 % 200 + 1 for number in range(40)]
IN_PLACE, ASLEEP, SHADOW, PLAIN = (
    "resume of the weights, update, resume of the rest",
    "resume, after an update while asleep",
    "that update, which may overlap the training",
    "resume without an update",
)


def tokens(client: Client, count: int = 1) -> list[int]:
    output: list[int] = client.generate(input_ids=PROMPT, max_new_tokens=count)["output_ids"]
    return output


def measure(client: Client, folders: list[Path], repeats: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {way: [] for way in (IN_PLACE, ASLEEP, SHADOW, PLAIN)}
    expected: dict[Path, list[int]] = {}

    def ends(way: str, begin: float, folder: Path) -> None:
        """Take the time at the first token; then the tokens have to be those of the checkpoint."""
        tokens(client)
        seconds[way].append(time.perf_counter() - begin)
        if tokens(client, 16) != expected.setdefault(folder, tokens(client, 16)):
            raise RuntimeError(f"{way}: other tokens than those of {folder.name}")

    for number in range(2 * repeats + 1):  # the first round warms up
        for way in (IN_PLACE, ASLEEP) if number % 2 else (ASLEEP, IN_PLACE):
            folder = folders[len(seconds[IN_PLACE] + seconds[ASLEEP]) % 2]
            client.release()
            begin = time.perf_counter()
            if way == IN_PLACE:
                client.resume(["weights"])
                client.update_weights_from_disk(folder)
            else:
                client.update_weights_from_disk(folder)
                seconds[SHADOW].append(time.perf_counter() - begin)
                begin = time.perf_counter()
            client.resume()
            ends(way, begin, folder)
            client.release()
            begin = time.perf_counter()
            client.resume()
            ends(PLAIN, begin, folder)
    if len(expected) < 2 or len({tuple(each) for each in expected.values()}) < 2:
        raise RuntimeError("both checkpoints give equal tokens, which proves nothing")
    return {way: times[len(times) // (2 * repeats + 1) :] for way, times in seconds.items()}


def to_markdown(result: dict[str, Any]) -> str:
    lines = [
        f"# New weights for a sleeping engine: {result['model']}, {result['device']}, torch {result['torch']}",
        "",
        f"{result['date']}, `{result['command']}`. {result['bytes'] / 1e9:.1f} GB of weights; seconds until the first "
        "token, median (fastest to slowest). Tokens were those of the checkpoint each time.",
        "",
        "| what | seconds |",
        "|---|---|",
    ]
    medians = {way: statistics.median(times) for way, times in result["seconds"].items()}
    for way, times in result["seconds"].items():
        lines.append(f"| {way} | {medians[way]:.3f} ({min(times):.3f} to {max(times):.3f}) |")
    lines += [
        "",
        f"After the training: {medians[ASLEEP] / medians[IN_PLACE]:.2f} of the time of an update in place. "
        f"Against a wake-up without an update: {medians[ASLEEP] / medians[PLAIN]:.2f}.",
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG, help="config.json of the model's shape")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as written:
        folders = [Path(written, name) for name in ("one", "two")]
        for seed, folder in enumerate(folders):
            folder.mkdir()
            write_checkpoint(options.config, folder, seed=20 + seed)
        engine = TransformersEngine(folders[0])
        with attach(engine) as server, Client(server.url, timeout_s=600) as client:
            seconds = measure(client, folders, options.repeats)
        engine.close()
        nbytes = (folders[0] / "model.safetensors").stat().st_size
    result = {
        **new_result("sleeping_update.py"),
        "model": options.config.parent.name,
        "device": torch.cuda.get_device_name(0) if ON_GPU else "host driver",
        "torch": torch.__version__,
        "bytes": nbytes,
        "seconds": seconds,
    }
    print(write("sleeping-update", result, to_markdown, options.out))


if __name__ == "__main__":
    main()
