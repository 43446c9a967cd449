"""Which engines make room for another on the GPUs that they share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memsaver_server.fleet.turns.seat import Seat


def free_bytes(gpu: str, seats: Iterable[Seat]) -> int | None:
    """Return what is free on a GPU by the engines' own counts, the least of them; None if none says."""
    return min((each.free[gpu] for each in seats if gpu in each.free), default=None)


def victims(seat: Seat, seats: Sequence[Seat]) -> list[Seat] | None:
    """Return the engines that have to be released, in whole, before ``seat`` fits; None if it would not fit even then.

    Those without requests in flight come first, of those the one that has been idle longest.
    """
    others = [one for one in seats if one is not seat and one.is_awake and set(one.gpus) & set(seat.gpus)]
    others.sort(key=lambda one: (one.in_flight > 0, one.last_used))
    short = {gpu: missing for gpu in seat.gpus if (missing := _missing(seat, gpu, seats)) > 0}
    chosen: list[Seat] = []
    for one in others:
        if not short and len(chosen) >= seat.extra:
            break
        if seat.extra > len(chosen) or short.keys() & set(one.gpus):
            chosen.append(one)
            freed = one.share_of(one.resident_bytes)
            short = {gpu: size - freed * (gpu in one.gpus) for gpu, size in short.items()}
            short = {gpu: size for gpu, size in short.items() if size > 0}
    return chosen if not short and len(chosen) >= seat.extra else None


def _missing(seat: Seat, gpu: str, seats: Iterable[Seat]) -> int:
    free = seat.free.get(gpu, free_bytes(gpu, seats))  # its own count is what its resume goes by
    return seat.share_of(seat.released_bytes) - free if free is not None else 0
