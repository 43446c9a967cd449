"""Shared by all tests."""

from __future__ import annotations

import gc
import sys
from itertools import pairwise

from tests.native import injection

# Before any test imports memsaver: one saver serves all tests of a process. Tests on a GPU use the product's own
# module; those that need faults there have them in child processes. The tests with SGLang import none.
if ("-m", "gpu") not in pairwise(sys.argv) and "tests/sglang" not in sys.argv:
    injection.install()

import pytest
import torch

from tests.hooks import (  # noqa: F401
    pytest_configure,
    pytest_runtest_logreport,
    pytest_runtest_protocol,
    pytest_terminal_summary,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left_over() -> None:
    """Free what earlier files no longer use: closed engines are often parts of reference cycles."""
    gc.collect()
