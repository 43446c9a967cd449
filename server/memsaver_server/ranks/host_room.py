"""Whether this host has memory for the backups of all ranks on it: each rank alone may count on all that is free."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from memsaver_core.errors import OutOfHostMemoryError
from memsaver_core.ranks.protocol import Plan
from memsaver_core.release_resume import available_host_bytes
from memsaver_core.reports import Status


def shortage(
    plans: Sequence[Plan], statuses: Sequence[Status | None], here: Collection[int]
) -> OutOfHostMemoryError | None:
    """Return the error of a release by these plans, of the ranks ``here``; None if there is enough memory.

    What is in a shared store is not counted: what the store lacks shows only while content is saved.
    """
    needed = 0
    for rank in here:
        status = statuses[rank]
        if status is not None and status.host_backup.shared_store is None:
            backup = status.host_backup
            growing = max(0, backup.target_bytes - backup.capacity_bytes)
            needed += max(0, plans[rank].host_bytes_needed - backup.unused_bytes - growing)
    if needed == 0 or needed <= (free := available_host_bytes()):
        return None
    return OutOfHostMemoryError(
        f"the backups of all ranks need {needed} more bytes of host memory together, and {free} are free; nothing was "
        "released: release fewer tags, discard some, or free host memory",
        needed,
        free,
    )
