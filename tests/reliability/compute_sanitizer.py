"""Runs the tests on a GPU under compute-sanitizer: memcheck over the core, graphs, sharing, modules and the reference
engine, racecheck over the digest kernel.

    python -m tests.reliability.compute_sanitizer

Errors that calls return are not counted (`--report-api-errors no`): many tests cause them on purpose. The figures are
kept for docs/reliability.md; the exit code is 1 where there was any finding, or a test failed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.reliability.figures import keep

ROOT = Path(__file__).parents[2]
CORE = "tests/gpu/test_core_gpu.py"
GRAPHS = "tests/gpu/test_graphs_gpu.py"
SHARING = "tests/gpu/test_sharing_gpu.py"
MODULE = "tests/gpu/test_module_gpu.py"
ENGINE = "tests/gpu/test_engine_gpu.py"
DIGEST = f"{CORE}::test_kernel_digest_equals_host_digest"

#: These take all memory, of which the tool needs some, or are about another process, where it does not look. In the
#: last one the tool keeps Python's frames, and so the tensors that are to go.
ELSEWHERE = (
    "test_out_of_memory_reaches_torch or test_clean_exit or test_expandable_segments or another_process"
    " or exit_while_released or a_copy_is_shared or destroyed_while_released"
)
#: Those whose kernels are torch's and ours: Inductor's compiler runs in processes of its own.
MODULES = "goes_and_comes_back or documented_graph"

#: Imports come before the first CUDA call, and may take longer than the tool waits by default.
ALWAYS = ("--report-api-errors", "no", "--target-processes", "application-only", "--launch-timeout", "120")

RUNS: dict[str, tuple[list[str], list[str]]] = {
    "racecheck, digest kernel": (["--tool", "racecheck", "--racecheck-report", "all"], [DIGEST]),
    "memcheck, digest kernel": (["--tool", "memcheck"], [DIGEST]),
    "memcheck, core": (["--tool", "memcheck"], [CORE, "-k", f"not ({ELSEWHERE})"]),
    "memcheck, graphs": (["--tool", "memcheck"], [GRAPHS, "-k", f"not ({ELSEWHERE})"]),
    "memcheck, sharing": (["--tool", "memcheck"], [SHARING, "-k", f"not ({ELSEWHERE})"]),
    "memcheck, modules": (["--tool", "memcheck"], [MODULE, "-k", MODULES]),
    "memcheck, engine": (["--tool", "memcheck"], [ENGINE]),
}

SHAPE = ROOT / "tests" / "data" / "qwen2-1.5b" / "config.json"
#: What the engine's tests serve here: the same model, with fewer and smaller layers.
SMALLER = {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}

#: The digest kernel reads past the end of what is mapped: that the tool looks at this kernel, and at our mappings.
PLANTED = """
import torch, memsaver_core as ms
from memsaver_core import _process
with ms.region("weights"):
    data = torch.zeros(32 << 20, dtype=torch.uint8, device="cuda")
_process.saver().digest(0, data.data_ptr() + data.numel() - 4096, 8192, (1, 2, 3, 4))
"""


def find() -> str:
    """The tool, on the path or where CUDA is usually installed."""
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if found is None:
        sys.exit("compute-sanitizer is neither on the PATH nor in /usr/local/cuda/bin; it comes with the CUDA toolkit")
    return found


#: One run takes seconds; one that hangs is a finding.
LIMIT_S = 300


def watch(tool: str, options: list[str], *program: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run a Python program under the tool; returns its end, and what the tool said."""
    with tempfile.TemporaryDirectory() as folder:
        log, shape = Path(folder) / "log", Path(folder) / "config.json"
        shape.write_text(json.dumps({**json.loads(SHAPE.read_text()), **SMALLER}))
        result = subprocess.run(
            [tool, *options, *ALWAYS, "--log-file", str(log), sys.executable, *program],
            cwd=ROOT,
            env={**os.environ, "MEMSAVER_TEST_SHAPE": str(shape)},
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        return result, log.read_text() if log.exists() else ""


def run(tool: str, options: list[str], tests: list[str]) -> dict[str, Any]:
    began = time.monotonic()
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "0")
    result, report = watch(tool, options, *pytest, *tests)
    counts = [int(count) for count in re.findall(r"SUMMARY: (\d+) (?:error|hazard)", report)]
    passed = re.search(r"(\d+) passed", result.stdout)
    if result.returncode != 0 or not counts or sum(counts):
        print(result.stdout[-6000:], result.stderr[-2000:], report[-6000:], sep="\n", file=sys.stderr)
    return {
        "tests": int(passed.group(1)) if passed else 0,
        "findings": sum(counts) if counts else None,  # None: the tool itself did not get to its end
        "exit_code": result.returncode,
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    tool = find()
    version = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    _, planted = watch(tool, ["--tool", "memcheck"], "-c", PLANTED)
    if "memsaver_digest" not in planted:
        sys.exit(f"compute-sanitizer does not find what was planted:\n{planted}")
    figures: dict[str, Any] = {"version": version.partition("Version ")[2].split()[0], "runs": {}}
    for name, (options, tests) in RUNS.items():
        figures["runs"][name] = run(tool, options, tests)
        keep("compute_sanitizer", figures)
    if any(figure["findings"] != 0 or figure["exit_code"] != 0 for figure in figures["runs"].values()):
        sys.exit("compute-sanitizer found something, or a test failed")


if __name__ == "__main__":
    main()
