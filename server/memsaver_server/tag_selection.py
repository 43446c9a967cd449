"""Which tags an operation works on: the cheapest that free enough memory, and those that no client names."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace

from memsaver_core import MemsaverError
from memsaver_core.options import ReleaseOptions
from memsaver_core.policies import keeps_all, keeps_any
from memsaver_core.reports import Status, TagStatus
from memsaver_server.operation import ReleaseRequest

#: The tags that every client names. Other tags that a release of everything took are resumed with the last of these:
#: clients that name what they resume do not know an engine's workspace, and some do not know its graphs.
COMMON_TAGS = frozenset({"weights", "kv_cache"})


class NotEnoughToReleaseError(MemsaverError):
    """``at_least_bytes`` is more than the requested tags hold. Nothing was released."""

    kind = "not_enough_to_release"
    status = 400

    def __init__(self, wanted: int, held: int) -> None:
        self.held_bytes = held
        super().__init__(
            f"at_least_bytes is {wanted}, but the tags asked for hold {held} bytes on the device; nothing was released"
        )

    def details(self) -> dict[str, int]:
        return {"held_bytes": self.held_bytes}


def released_tags(status: Status) -> set[str]:
    """Return the tags with unmapped memory: while there are any, no request may reach a kernel."""
    return {tag.tag for tag in status.tags if tag.released_bytes or tag.state in ("releasing", "resuming")}


def keeps_content(tag: TagStatus, options: ReleaseOptions) -> bool:
    """Whether a release with ``options`` keeps all content of ``tag``."""
    return keeps_all(options.restore.get(tag.tag, tag.restore))


def lost_tags(before: Iterable[TagStatus], after: Iterable[TagStatus], options: ReleaseOptions) -> set[str]:
    """Return the tags whose content a release with ``options`` discarded, also if it failed half way.

    A tag that was released already keeps its backup, unless that was damaged and has been given up.
    """
    held = {tag.tag: tag for tag in before}
    lost = set()
    for tag in after:
        was = held.get(tag.tag)
        released, backed_up = (was.released_bytes, was.backed_up_bytes) if was is not None else (0, 0)
        given_up = tag.released_bytes == released > 0 and tag.backed_up_bytes < backed_up
        if (tag.released_bytes > released or given_up) and not keeps_content(tag, options):
            lost.add(tag.tag)
    return lost


def needs_writing(tag: TagStatus, options: ReleaseOptions) -> bool:
    """Whether the content of ``tag``, which a release with ``options`` discarded, has to be written before it is used.

    A region that keeps nothing by its own policy holds what the engine computes again: a KV cache, workspaces. Weights
    are the exception: an engine whose weights are always overwritten after a resume does not keep them.
    """
    return tag.tag == "weights" or (tag.tag in options.restore and keeps_any(tag.restore))


def options_for(request: ReleaseRequest, tags: Iterable[TagStatus]) -> ReleaseOptions:
    """Return the options of ``request``, narrowed to the cheapest tags that hold ``at_least_bytes`` if it is given.

    Raises:
        NotEnoughToReleaseError: they hold less.
    """
    options = request.options
    if request.at_least_bytes is None:
        return options
    candidates = [tag for tag in tags if tag.resident_bytes and (not options.tags or tag.tag in options.tags)]
    # Discarded before kept, then tags with a complete backup; among equals the largest first, so that few are touched.
    candidates.sort(key=lambda tag: (keeps_content(tag, options), tag.backed_up_bytes < tag.bytes, -tag.resident_bytes))
    chosen: list[str] = []
    found = 0
    for tag in candidates:
        if found >= request.at_least_bytes:
            break
        chosen.append(tag.tag)
        found += tag.resident_bytes
    if found < request.at_least_bytes:
        raise NotEnoughToReleaseError(request.at_least_bytes, found)
    return replace(options, tags=tuple(chosen))


class ImplicitTags:
    """The tags that only a release of everything has taken, so that a client may never name them in a resume."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tags: set[str] = set()

    def released(self, requested: tuple[str, ...], released: Iterable[str]) -> None:
        """Note a release of the ``requested`` tags (none: all), after which the tags ``released`` are unmapped."""
        with self._lock:
            if requested:
                self._tags.difference_update(requested)
            else:
                self._tags.update(released)

    def resumed(self, tags: Iterable[str]) -> None:
        with self._lock:
            self._tags.difference_update(tags)

    def complete(self, requested: tuple[str, ...], released: set[str]) -> tuple[str, ...]:
        """Return the tags to resume: ``requested``, and all others if those are implicit and not common tags."""
        if not requested:
            return ()
        left = released - set(requested)
        with self._lock:
            implicit = left <= self._tags and not left & COMMON_TAGS
        return (*requested, *sorted(left)) if implicit else requested
