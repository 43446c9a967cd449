"""A warm start: seconds until the weights of Qwen3-8B's shape are on the device from the shared store, beside a load of
the same weights from safetensors on the disk and in the page cache, and one copy of as many bytes in host memory by all
cores: content of a store reaches the device through pinned memory, so no warm start is faster.

Each start is a separate process; the time is of the load alone, with the model made and the context open. A keeper
holds the weights between the starts. The content is compared after each.
``--engine``: instead, seconds from the start of a server's process to its first token, by load format: ``dummy`` loads
nothing, ``auto`` loads safetensors from the page cache, or from the disk, ``memsaver`` takes the weights from the
store; and of it, what the engine's log has for the loading of the model. Without graphs, which all would capture.

    python benchmarks/warm_start.py                     # needs 35 GiB of disk and 40 GiB of host memory
    python benchmarks/warm_start.py --config tests/data/qwen2-1.5b/config.json --repeats 3 --out /tmp
    python benchmarks/warm_start.py --engine vllm --repeats 2   # a start of vLLM may take a minute
    MEMSAVER_DRIVER=host python benchmarks/warm_start.py --config CONFIG.json --repeats 1 --out /tmp
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import _sglang_server
import torch
from _checkpoint import PROMPTS, write_checkpoint
from _http_engines import ask, vllm
from _http_engines import started as served
from _machine import about_gpu
from _record import ROOT, new_parser, new_result, write

from memsaver_core.manifests import keeper_command

ON_GPU = torch.cuda.is_available() and os.environ.get("MEMSAVER_DRIVER") != "host"
#: What an engine logs once it has loaded the model.
LOADED = {
    "sglang": r"Load weight end\. elapsed=([\d.]+) s",
    "vllm": r"Model loading took [\d.]+ GiB(?: memory)? and ([\d.]+) seconds",
}
#: A core copies so many bytes at a time.
PIECE = 4 << 20
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


def copy_in_host_memory(nbytes: int) -> float:
    """Read a new mapping of shared memory into a small buffer with all cores; return the seconds."""
    file, cores = os.memfd_create("source"), os.cpu_count() or 1
    os.ftruncate(file, nbytes)
    with mmap.mmap(file, nbytes) as written:
        torch.frombuffer(written, dtype=torch.uint8).fill_(1)
    source = torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)
    os.close(file)
    target = torch.ones(cores * PIECE, dtype=torch.uint8)

    def copy(place: int) -> None:
        for start in range(place * PIECE, nbytes, cores * PIECE):
            to, content = target.data_ptr() + place * PIECE, source.data_ptr() + start
            ctypes.memmove(to, content, min(PIECE, nbytes - start))

    with ThreadPoolExecutor(cores) as threads:
        begin = time.perf_counter()
        list(threads.map(copy, range(cores)))
        return time.perf_counter() - begin


def first_token(engine: str, load_format: str, folder: Path, logs: Path) -> tuple[float, float]:
    """Start a server; return the seconds until its first token, and those in which it loaded the model."""
    begin = time.perf_counter()
    more = ("--load-format", load_format)
    if engine == "vllm":
        kind = vllm(str(folder), 0.6, PROMPTS[0], 1, "--enforce-eager", *more)
        with served(kind, engine, logs) as client:
            first, _ = ask(client, kind.path, {**kind.body, "model": engine})
            log = (logs / f"{engine}.log").read_text()
    else:
        arguments = ["--attention-backend", "triton", "--mem-fraction-static", "0.6", "--disable-cuda-graph"]
        with _sglang_server.started("service", folder, None, [*arguments, *more]) as server:
            server.wait_until_up()
            server.generate(PROMPTS[0], 1)
            first, log = time.perf_counter(), server.output()
    loading = re.search(LOADED[engine], log)
    if loading is None or (load_format == "memsaver" and "loaded in the ordinary way" in log):
        raise RuntimeError(f"{engine} took no weights from the store:\n{log[-3000:]}")
    return first - begin, float(loading[1])


def starts_of(engine: str, folder: Path, store: str, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each load format."""
    os.environ["MEMSAVER_SHARED_BACKUPS"] = store
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as logs:
        with suppress(RuntimeError):  # the store has none of this engine's; kernels are compiled now
            first_token(engine, "memsaver", folder, Path(logs))
        for _ in range(repeats):
            for way in ("dummy", "auto", "memsaver", "auto, from the disk"):
                if way == "auto, from the disk" and not drop_from_page_cache(folder / "model.safetensors"):
                    continue
                seconds, loading = first_token(engine, way.split(",")[0], folder, Path(logs))
                found.setdefault(way, []).append(seconds)
                found.setdefault(f"{way}: loading the model", []).append(loading)
                print(engine, way, seconds, loading, file=sys.stderr, flush=True)
    return found


def drop_from_page_cache(file: Path) -> bool:
    """Return whether nearly nothing of the file is in the page cache now: a file system in memory keeps it there."""
    with file.open("r+b") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(opened.fileno(), 0) as content:
            pages = (ctypes.c_ubyte * (-(-len(content) // mmap.PAGESIZE)))()
            first = ctypes.c_char.from_buffer(content)
            failed = ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(len(content)), pages)
            del first
    return not failed and sum(page & 1 for page in pages) < len(pages) / 100


def loads(folder: Path, store: str, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each way to load; the first load brings the file into the page cache."""
    found: dict[str, list[float]] = {}
    on_disk = drop_from_page_cache(folder / "model.safetensors")
    expected = started(folder, "")
    if on_disk:
        found["safetensors on the disk"] = [expected["seconds"]]
    ways = {
        "safetensors in the page cache": ("", 1),
        "safetensors, and given to the store": (store, 1),
        "the shared store": (store, repeats),
    }
    for way, (name, count) in ways.items():
        for _ in range(count):
            run = started(folder, name)
            if run["sums"] != expected["sums"] or (not run["reason"]) != (way == "the shared store"):
                raise RuntimeError(f"{way}: other weights, or {run['reason'] or 'loaded from the store'}")
            found.setdefault(way, []).append(run["seconds"])
            print(way, run["seconds"], file=sys.stderr, flush=True)
    found["one copy in host memory"] = [copy_in_host_memory(expected["bytes"]) for _ in range(repeats)]
    return found


def machine(engine: str | None) -> str:
    about = about_gpu() if ON_GPU else {"gpu": "host driver", "torch": torch.__version__}
    parts = [about["gpu"], f"torch {about['torch']}"]
    return ", ".join([*parts, f"{engine} {version(engine)}"] if engine else parts)


def to_markdown(result: dict[str, Any]) -> str:
    about = (
        "until they are on the device, in a new process each time; all of the store's are compared with their digests"
    )
    if result["engine"]:
        about = f"from the start of {result['engine']}'s process to its first token, without graphs"
    lines = [
        f"# Warm start: {result['model']}, {result['machine']}",
        "",
        f"{result['date']}, `{result['command']}`. {result['bytes'] / 1e9:.1f} GB of weights in bfloat16; seconds",
        f"{about}.",
        "",
        f"| {'load format' if result['engine'] else 'weights from'} | median | each |",
        "|---|---|---|",
    ]
    for name, seconds in result["seconds"].items():
        lines.append(f"| {name} | {statistics.median(seconds):.2f} | {', '.join(f'{each:.2f}' for each in seconds)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    if sys.argv[1:2] == ["--start"]:
        print(json.dumps(start(Path(sys.argv[2]))))
        return
    parser = new_parser(__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG, help="config.json of the model's shape")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engine", choices=["sglang", "vllm"])
    options = parser.parse_args()
    store = f"benchmark-{uuid4().hex[:12]}"
    with tempfile.TemporaryDirectory() as written:
        folder = Path(written)
        write_checkpoint(options.config, folder)
        nbytes = (folder / "model.safetensors").stat().st_size
        keeper = subprocess.Popen(keeper_command(store, 3 * nbytes, 3 * nbytes), stdout=subprocess.DEVNULL)
        try:
            if options.engine:
                seconds = starts_of(options.engine, folder, store, options.repeats)
            else:
                seconds = loads(folder, store, options.repeats)
        finally:
            keeper.terminate()
            keeper.wait()
    result = {
        **new_result("warm_start.py"),
        "model": options.config.parent.name,
        "machine": machine(options.engine),
        "engine": options.engine,
        "bytes": nbytes,
        "seconds": seconds,
    }
    print(write(f"warm-start-{options.engine}" if options.engine else "warm-start", result, to_markdown, options.out))


if __name__ == "__main__":
    main()
