"""Which tags an operation works on: the cheapest that free enough memory, and those that no client names."""

from __future__ import annotations

from collections.abc import Iterable

from memsaver_core.contract.errors import NotEnoughToReleaseError
from memsaver_core.contract.policies import keeps_all, keeps_any
from memsaver_core.contract.requests import MemoryRequest, Release
from memsaver_core.contract.status import Status, TagStatus


def released_tags(status: Status) -> set[str]:
    """Return the tags with unmapped memory: while there are any, no request may reach a kernel."""
    return {tag.tag for tag in status.tags if tag.released_bytes or tag.state in ("releasing", "resuming")}


def asleep_dp_ranks(status: Status) -> frozenset[int]:
    """Return the data-parallel engines of which memory is released."""
    return frozenset(rank.dp_rank for rank in status.ranks if rank.dp_rank is not None and rank.state != "resident")


def keeps_content(tag: TagStatus, request: MemoryRequest) -> bool:
    return keeps_all(request.restore.get(tag.tag, tag.restore))


def lost_tags(before: Iterable[TagStatus], after: Iterable[TagStatus], request: MemoryRequest) -> set[str]:
    """Return the tags whose content a release by ``request`` discarded, also if it failed half way.

    A tag that was released already keeps its backup, unless that was damaged and has been given up.
    """
    held = {tag.tag: tag for tag in before}
    lost = set()
    for tag in after:
        was = held.get(tag.tag)
        released, backed_up = (was.released_bytes, was.backed_up_bytes) if was is not None else (0, 0)
        given_up = tag.released_bytes == released > 0 and tag.backed_up_bytes < backed_up
        if (tag.released_bytes > released or given_up) and not keeps_content(tag, request):
            lost.add(tag.tag)
    return lost


def needs_writing(tag: TagStatus, request: MemoryRequest) -> bool:
    """Whether the content of ``tag``, which a release by ``request`` discarded, has to be written before it is used.

    A region that keeps nothing by its own policy holds what the engine computes again: a KV cache, workspaces. Weights
    are the exception: an engine whose weights are always overwritten after a resume does not keep them.
    """
    return tag.tag == "weights" or (tag.tag in request.restore and keeps_any(tag.restore))


def narrowed(request: Release, tags: Iterable[TagStatus]) -> Release:
    """Return ``request``, narrowed to the cheapest tags that hold ``at_least_bytes`` if it is given; raise
    NotEnoughToReleaseError if they hold less."""
    if request.at_least_bytes is None:
        return request
    candidates = [tag for tag in tags if tag.resident_bytes and request.concerns(tag.tag)]
    # Discarded before kept, then tags with a complete backup; among equals the largest first, so that few are touched.
    candidates.sort(key=lambda tag: (keeps_content(tag, request), tag.backed_up_bytes < tag.bytes, -tag.resident_bytes))
    chosen: list[str] = []
    found = 0
    for tag in candidates:
        if found >= request.at_least_bytes:
            break
        chosen.append(tag.tag)
        found += tag.resident_bytes
    if found < request.at_least_bytes:
        raise NotEnoughToReleaseError(
            f"at_least_bytes is {request.at_least_bytes}, but the tags asked for hold {found} bytes on the device; "
            "nothing was released",
            found,
        )
    return request.model_copy(update={"tags": tuple(chosen)})
