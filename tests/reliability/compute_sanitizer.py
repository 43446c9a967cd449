"""Runs GPU tests under compute-sanitizer: memcheck for the core, graphs, sharing, modules and the reference engine,
racecheck for the kernels that digest and pack.

Run it as ``python -m tests.reliability.compute_sanitizer``. Errors that calls return are not counted (`--report-api-
errors no`), because many tests cause them on purpose. The figures are kept for docs/reliability.md; the exit code is 1
if there was a finding or a test failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.reliability.figures import keep, kept

ROOT = Path(__file__).parents[2]
CORE = "tests/gpu/test_core_gpu.py"
GRAPHS = "tests/gpu/test_graphs_gpu.py"
SHARING = "tests/gpu/test_sharing_gpu.py"
MODULE = "tests/gpu/test_module_gpu.py"
ENGINE = "tests/gpu/test_engine_gpu.py"
DEVICES = "tests/devices"
DIGEST = f"{CORE}::test_kernel_digest_equals_host_digest"
PACKING = "tests/devices/test_packed_content.py"

#: These take all memory, of which the tool needs some, or test another process, which it does not check. In the last
#: one the tool keeps Python's frames alive, and so the tensors that must be freed.
ELSEWHERE = (
    "test_out_of_memory_reaches_torch or test_clean_exit or test_expandable_segments or another_process"
    " or exit_while_released or a_copy_is_shared or destroyed_while_released"
)
#: Tests with only torch's and our kernels: Inductor's compiler runs in processes of its own.
MODULES = "goes_and_comes_back or documented_graph"

#: Thousands of steps, each of which takes a tenth of a second under the tool.
LONG = "every_batch_size or frozen_over"

#: Imports precede the first CUDA call, and may take longer than the tool's default timeout.
ALWAYS = ("--report-api-errors", "no", "--target-processes", "application-only", "--launch-timeout", "120")

RUNS: dict[str, tuple[list[str], list[str]]] = {
    "racecheck, digest kernel": (["--tool", "racecheck", "--racecheck-report", "all"], [DIGEST]),
    "memcheck, digest kernel": (["--tool", "memcheck"], [DIGEST]),
    "racecheck, kernels that pack": (["--tool", "racecheck", "--racecheck-report", "all"], [PACKING]),
    "memcheck, kernels that pack": (["--tool", "memcheck"], [PACKING]),
    "memcheck, core": (["--tool", "memcheck"], [CORE, f"{DEVICES}/test_regions.py", "-k", f"not ({ELSEWHERE})"]),
    "memcheck, caches that shrink": (["--tool", "memcheck"], [f"{DEVICES}/test_resizing.py"]),
    "memcheck, graphs": (["--tool", "memcheck"], [GRAPHS, "-k", f"not ({ELSEWHERE})"]),
    "memcheck, sharing": (["--tool", "memcheck"], [SHARING, f"{DEVICES}/test_sharing.py", "-k", f"not ({ELSEWHERE})"]),
    "memcheck, modules": (["--tool", "memcheck"], [MODULE, f"{DEVICES}/test_modules.py", "-k", MODULES]),
    "memcheck, engine": (["--tool", "memcheck"], [ENGINE, "-k", f"not ({LONG})"]),
}

SHAPE = ROOT / "tests" / "data" / "qwen2-1.5b" / "config.json"
#: The engine's tests use the same model here, with fewer and smaller layers.
SMALLER = {
    "num_hidden_layers": 1,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "vocab_size": 2048,
}

#: The digest kernel reads past the mapped range: shows that the tool checks this kernel and our mappings.
PLANTED = """
import torch, memsaver_core as ms
from memsaver_core import process
with ms.region("weights"):
    data = torch.zeros(32 << 20, dtype=torch.uint8, device="cuda")
process.saver().digest(0, data.data_ptr() + data.numel() - 4096, 8192, (1, 2, 3, 4))
"""


def find() -> str:
    """The tool's path, from the PATH or CUDA's usual folder."""
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if found is None:
        sys.exit("compute-sanitizer is neither on the PATH nor in /usr/local/cuda/bin; it comes with the CUDA toolkit")
    return found


#: A run takes seconds, the engine's minutes; a hang counts as a finding.
LIMIT_S = 540


def watch(tool: str, options: list[str], *program: str) -> tuple[int | None, str, str]:
    """Run a Python program under the tool: its exit code (None if it did not end), its output, the report."""
    with tempfile.TemporaryDirectory() as folder:
        log, shape, output = (Path(folder) / name for name in ("log", "config.json", "output"))
        shape.write_text(json.dumps({**json.loads(SHAPE.read_text()), **SMALLER}))
        with output.open("w") as file:
            process = subprocess.Popen(
                [tool, *options, *ALWAYS, "--log-file", str(log), sys.executable, "-u", *program],
                cwd=ROOT,
                env={**os.environ, "MEMSAVER_TEST_SHAPE": str(shape)},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # the program too, not only the tool
        return process.returncode, output.read_text(), log.read_text() if log.exists() else ""


def run(tool: str, options: list[str], tests: list[str]) -> dict[str, Any]:
    began = time.monotonic()
    pytest = ("-m", "pytest", "-v", "--durations", "10", "-p", "no:cacheprovider", "--timeout", "0")
    code, output, report = watch(tool, options, *pytest, *tests)
    counts = [int(count) for count in re.findall(r"SUMMARY: (\d+) (?:error|hazard)", report)]
    passed = re.search(r"(\d+) passed", output)
    if code != 0 or not counts or sum(counts):
        print(output[-6000:], report[-6000:], sep="\n", file=sys.stderr)
    return {
        "tests": int(passed.group(1)) if passed else 0,
        "findings": sum(counts) if counts else None,  # None: the tool itself did not finish
        "exit_code": code,
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.compute_sanitizer")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the runs whose name holds this")
    only = parser.parse_args().only
    tool = find()
    version = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    _, _, planted = watch(tool, ["--tool", "memcheck"], "-c", PLANTED)
    if "memsaver_digest" not in planted:
        sys.exit(f"compute-sanitizer does not find what was planted:\n{planted}")
    figures: dict[str, Any] = {"version": version.partition("Version ")[2].split()[0], "runs": {}}
    if only:
        figures["runs"] = kept("compute_sanitizer").get("runs", {})
    for name, (options, tests) in RUNS.items():
        if only in name:
            figures["runs"][name] = run(tool, options, tests)
            keep("compute_sanitizer", figures)
    if any(figure["findings"] != 0 or figure["exit_code"] != 0 for figure in figures["runs"].values()):
        sys.exit("compute-sanitizer found something, or a test failed")


if __name__ == "__main__":
    main()
