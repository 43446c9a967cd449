"""Which communicators the ranks suspend. NCCL waits inside for every rank of a communicator, so all of them must agree
before any of them begins."""

from __future__ import annotations

from collections.abc import Sequence

from memsaver_core.ranks.protocol import Plan


def suspendable(plans: Sequence[Plan]) -> tuple[tuple[str, ...], list[str]]:
    """Return the communicators that all of their ranks can suspend, sorted, and why each of the others stays."""
    found = sorted({each.name for plan in plans for each in plan.communicators})
    names, reasons = [], []
    for name in found:
        members = {rank: each for rank, plan in enumerate(plans) for each in plan.communicators if each.name == name}
        ranks = max(each.ranks for each in members.values())
        stays = [f"rank {rank}: {each.obstacle}" for rank, each in members.items() if each.obstacle]
        if len(members) < ranks:
            stays.append(f"{len(members)} of the {ranks} ranks of communicator {name!r} are this engine's")
        if stays:
            reasons += stays
        elif not all(each.suspended for each in members.values()):
            names.append(name)
    return tuple(names), reasons


def suspended(plans: Sequence[Plan]) -> tuple[str, ...]:
    """Return the communicators that are suspended, sorted."""
    return tuple(sorted({each.name for plan in plans for each in plan.communicators if each.suspended}))
