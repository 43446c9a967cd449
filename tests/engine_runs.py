"""What ran where: the outcome of each test with a real engine or on a GPU, by engine, version, torch, device and date.

A run with ``TESTS_RUNS=FOLDER`` adds its outcomes there, one file for each device and set of versions; a test that runs
again replaces its line. ``tests.reliability.document`` writes docs/reliability.md from all of them.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

#: The distribution of the engine whose tests are in files whose paths have this in them.
ENGINES = {"vllm": "vllm", "sglang": "sglang", "tokenspeed": "tokenspeed", "fleet_on_ray": "ray"}
#: Tests without such an engine are those of memsaver itself.
OWN = "memsaver"


def record(test: str, outcome: str) -> None:
    """Add a test's outcome to the folder that ``TESTS_RUNS`` names; at once, because a run may be cut short."""
    if outcome not in ("passed", "failed"):
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    engine = engine_of(test)
    about = {"engine": engine, "version": _version(engine), "torch": torch.__version__.split("+")[0]}
    about["device"] = f"{torch.cuda.device_count()} x {device}" if torch.cuda.device_count() > 1 else device
    name = re.sub(r"[^a-z0-9.]+", "-", "-".join(("tests", *about.values())).lower())
    file = Path(os.environ["TESTS_RUNS"], f"{name}.json")
    before = json.loads(file.read_text())["tests"] if file.exists() else {}
    date = datetime.now(timezone.utc).date().isoformat()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        json.dumps({**about, "date": date, "tests": {**before, test: outcome}}, indent=1, sort_keys=True) + "\n"
    )


def engine_of(test: str) -> str:
    return next((engine for part, engine in ENGINES.items() if part in test.partition("::")[0]), OWN)


def _version(engine: str) -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(engine)
    return ""
