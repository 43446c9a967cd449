"""Attached modules: their memory goes and comes back, and their outputs are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from memsaver_core import process
from tests.service import module_examples
from tests.service.module_examples import Example, check_occupation, example

from .kinds import on_cuda, on_host

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _same_kernels() -> Iterator[None]:
    """cuDNN chooses the same kernel each time: outputs are compared bit by bit."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        yield


#: Modules with their widths, in which the models of a GPU hold more than 64 MiB. The vision encoder replays a graph.
EXAMPLES = [
    *(
        pytest.param(make, 64, "cpu", marks=on_host)
        for make in (
            module_examples.denoiser,
            module_examples.embedder,
            module_examples.mixture,
            module_examples.tied,
        )
    ),
    *(
        pytest.param(make, width, "cuda", marks=on_cuda)
        for make, width in (
            (module_examples.denoiser, 1024),
            (module_examples.embedder, 1024),
            (module_examples.vision, 1024),
            (module_examples.mixture, 2048),
            (module_examples.tied, 4096),
        )
    ),
]


@pytest.mark.parametrize(
    ("make", "width", "device"), EXAMPLES, ids=lambda value: getattr(value, "__name__", str(value))
)
@pytest.mark.guards(
    "memory was reported free before it was free",
    "replaying a graph failed after its memory was discarded",
)
def test_it_goes_and_comes_back(make: Callable[[int], Example], width: int, device: str, slack: int) -> None:
    """Measured, over HTTP, with the same outputs from the same addresses."""
    with example(make, width) as made:
        assert all(process.saver().owns(each.untyped_storage().data_ptr()) for each in made.held)
        if device == "cuda":
            assert made.bytes > 64 * MIB
        check_occupation(made, slack_bytes=slack)
