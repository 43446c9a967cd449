"""Every call of the core to the driver and to the system (memory, files, threads) fails at each of its occurrences."""

from __future__ import annotations

import json

import pytest

from tests.amount import amount
from tests.native.build import built, run
from tests.reliability.figures import keep

#: Every STRIDE-th case: with 3, each call still fails at each of its occurrences, with a third of the errors.
STRIDE = amount(197, long=1)


@pytest.mark.long
@pytest.mark.timeout(7200)  # it may have to build the core; all cases take 15 minutes or more on a busy machine
@pytest.mark.guards(
    "running out of memory or other resources killed the process",
    "content was wrong after a restore",
    "freeing a released tensor released its memory twice",
    "only the current device was synchronized or restored",
)
def test_every_call_at_every_occurrence() -> None:
    """Everything is then as before, or released with its backup, and the retry works with correct content; frees of
    released memory and failed ones leave nothing behind, on every device. `make test-long` runs all cases."""
    figures = json.loads(run(built() / "every_call", "--stride", str(STRIDE)).splitlines()[-1])
    keep("every_call", figures | {"stride": STRIDE})
    assert figures["problems"] == 0
    assert figures["cases"] > 70_000 // STRIDE
