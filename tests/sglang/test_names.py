"""The names of SGLang that memsaver relies on, in the source of the installed version."""

from __future__ import annotations

import re

from memsaver_server.integrations.sglang import names, prefill_graphs

from .server import source


def test_names_of_the_scheduler() -> None:
    scheduler = source("managers/scheduler.py")
    for name in names.SCHEDULER:
        assert re.search(rf"\bself\.{name}(: [^=]*)? = |def {name}\(|\) = self\.{name}\b", scheduler), name


def test_names_of_requests() -> None:
    messages = source("managers/io_struct.py")
    for name in names.MESSAGES:
        assert f"class {name}(" in messages, name


def test_names_of_prefill_graphs() -> None:
    path, _, name = prefill_graphs.BACKEND.removeprefix("sglang.srt.").rpartition(".")
    graphs = source(path.replace(".", "/") + ".py")
    assert f"class {name}(" in graphs
    for text in ("enable_memory_saver: bool = False", "self._device_module = ", "if self._pool is None:"):
        assert text in graphs
    assert "def get_or_create_global_graph_memory_pool(device_module" in source("model_executor/runner_utils/pool.py")


def test_names_of_draft_models() -> None:
    assert "def draft_runners(self)" in source("speculative/base_spec_worker.py")
