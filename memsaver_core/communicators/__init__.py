"""NCCL communicators: found, counted, suspended and resumed through the libnccl that the process has loaded.

Suspending is collective: every rank of a communicator enters it. A service asks all ranks first whether they can; a
trainer calls ``communicators.suspend()`` on all of them between two steps, and later ``communicators.resume()``. CUDA
graphs with NCCL calls replay as before if NCCL_GRAPH_REGISTER=0 was set when they were captured. Needs NCCL 2.29.7;
``found`` reports what each communicator holds and what prevents its suspension.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Literal

from memsaver_core import process
from memsaver_core.communicators import discovery, sharing
from memsaver_core.communicators.discovery import Communicator
from memsaver_core.communicators.nccl import SUSPENDS, Held, loaded
from memsaver_core.communicators.nccl import warn_of_registered_graphs as warn_of_registered_graphs
from memsaver_core.contract.errors import ConfigurationError, MemsaverError, UnsupportedError
from memsaver_core.contract.policies import COMMUNICATORS, RestorePolicy
from memsaver_core.contract.status import CommunicatorStatus, TagStatus
from memsaver_core.rendezvous import started
from memsaver_core.shared_buffers import PeerBuffers

#: Deadline of a suspend or a resume, seconds. One of 480 MiB takes half a second.
TIMEOUT_S = 30.0


_lock = threading.Lock()  # one suspend, resume or count at a time
_registered: dict[str, Communicator] = {}
_counted: tuple[tuple[Communicator, CommunicatorStatus], ...] = ()
_shared: tuple[str, ...] = ()
#: Calls that may not have returned yet, by the communicator's name: ``suspend`` or ``resume``, and its outcome.
_late: dict[str, tuple[str, Future[None]]] = {}


def register(name: str, comm: int, *, ranks: int, rank: int, device: int | None = None) -> None:
    """Register a communicator that memsaver does not find by itself, so that it is suspended and resumed, too. Those of
    torch's process groups, and of vLLM's and SGLang's PyNcclCommunicator, are found. Raises ConfigurationError if the
    name is taken.

    Args:
        name: the same on all of its ranks, and of no other communicator that a rank of the engine has.
        comm: the ncclComm_t, as a number.
        ranks: how many it has; one of a single rank is passed over.
        rank: this process's number among them.
        device: torch's index of its device.
    """
    _check_free(name)
    if ranks > 1:
        _registered[name] = Communicator.of(name, comm, ranks=ranks, rank=rank, device=device, nccl=loaded())


def register_buffers(name: str, buffers: PeerBuffers) -> None:
    """Register the buffers of an engine's own all-reduce likewise; for ``name`` and errors see ``register``."""
    _check_free(name)

    def held() -> Held:
        return Held(suspendable=buffers.nbytes, persistent=0, suspended=buffers.suspended)

    calls = (held, buffers.suspend, buffers.resume)
    ranks, rank = buffers.sockets.ranks, buffers.sockets.rank
    _registered[name] = Communicator(name, ranks, rank, buffers.device_index, None, *calls, is_nccl=False)


def unregister(name: str) -> None:
    """Forget a communicator that was registered; call it before ncclCommDestroy."""
    _registered.pop(name, None)


def found() -> tuple[CommunicatorStatus, ...]:
    """Find and count the communicators of more than one rank, in the order of their creation. While some are being
    suspended or resumed, return what was counted before. Must not be called while the process is hibernated."""
    if _lock.acquire(blocking=False):
        try:
            _count()
        finally:
            _lock.release()
    return statuses()


def statuses() -> tuple[CommunicatorStatus, ...]:
    """Return what was counted last. Calls no driver."""
    return tuple(status for _, status in _counted)


def can_suspend() -> bool:
    """Return whether memsaver may suspend communicators, and the loaded NCCL can. Calls no driver."""
    library = None if process.core_settings().communicators == "off" else loaded()
    return library is not None and library.version >= SUSPENDS


def usable() -> bool:
    """Return whether no communicator is suspended, or being suspended or resumed. Calls no driver."""
    return not _late and not any(status.suspended for status in statuses())


def tag_status() -> TagStatus | None:
    """Return what was counted last as a tag; None if there are no communicators. Calls no driver."""
    if not (counted := _counted):
        return None
    mapped: Counter[int] = Counter()
    for each, status in counted:
        if each.device is not None:
            mapped[each.device] += status.suspendable_bytes
    resident = sum(status.suspendable_bytes for _, status in counted)
    released = sum(status.suspended_bytes for _, status in counted)
    return TagStatus(
        tag=COMMUNICATORS,
        restore=RestorePolicy.HOST.value,
        state="released" if any(status.suspended for _, status in counted) else "resident",
        bytes=resident + released,
        resident_bytes=resident,
        released_bytes=released,
        retained_bytes=0,
        backed_up_bytes=0,
        allocations=len(counted),
        chunks=0,
        mapped_by_device=mapped,
    )


def shared() -> tuple[str, ...]:
    """Return which other device memory ranks share, as counted last, each with what to change: this memory stays after
    a release and prevents a hibernation. Calls no driver."""
    return _shared


def suspend(names: Sequence[str] | None = None, timeout_s: float = TIMEOUT_S) -> dict[str, int]:
    """Give back the device memory of communicators, which cannot be used until ``resume``; return bytes, by name.

    ``names`` says which (None: all that can be suspended), ``timeout_s`` how long all of them may take together.
    One that is suspended already is passed over. Every rank of each communicator must call this, with no
    communication in flight: NCCL waits for all of them. If it fails on any rank, call ``resume`` on all of them.

    Raises:
        UnsupportedError: one of ``names`` does not exist or cannot be suspended; nothing was done.
        MemsaverError: NCCL failed, or another rank did not call this in time; names the communicator.
    """
    return _move("suspend", names, timeout_s)


def resume(names: Sequence[str] | None = None, timeout_s: float = TIMEOUT_S) -> None:
    """Bring communicators back, with the same addresses; one that is not suspended is passed over. Every rank of
    each must call this. Arguments and errors are those of ``suspend``."""
    _move("resume", names, timeout_s)


def _move(what: Literal["suspend", "resume"], names: Sequence[str] | None, timeout_s: float) -> dict[str, int]:
    with _lock:
        deadline = time.monotonic() + timeout_s
        _await_late(deadline)
        resuming = what == "resume"
        chosen = [(each, status) for each, status in _chosen(names, resuming) if status.suspended is resuming]
        try:
            for each, _ in chosen:
                # The call waits for the other ranks; its thread is left behind if they do not make it.
                call = started(each.resume if resuming else each.suspend, f"memsaver-{what}")
                _late[each.name] = (what, call)
            _await_late(deadline)
        finally:
            _count()
        return {each.name: status.suspendable_bytes for each, status in chosen}


def _check_free(name: str) -> None:
    if name in _registered:
        raise ConfigurationError(f"a communicator {name!r} is registered already; choose another name")


def _count() -> None:
    global _counted, _shared
    present = (*discovery.found(), *_registered.values()) if process.enabled() else ()
    _counted = tuple((each, _status(each)) for each in present)
    devices = [(each.name, each.device) for each in present if each.nccl and each.device is not None]
    uuids = {device: process.saver().device_info(device)["uuid"] for _, device in devices}
    fixed = [sharing.fabric_obstacle(name, device, uuids[device]) for name, device in devices]
    _shared = (*filter(None, fixed), *sharing.shared_memory())


def _chosen(names: Sequence[str] | None, resuming: bool) -> list[tuple[Communicator, CommunicatorStatus]]:
    """Return the communicators ``names`` in the order of their creation, which is the same on all ranks."""
    _count()
    if names is None:
        return [(each, status) for each, status in _counted if resuming or not status.obstacle]
    if missing := set(names) - {each.name for each, _ in _counted}:
        raise UnsupportedError(f"this process has no communicator {sorted(missing)[0]!r}; nothing was done")
    chosen = [(each, status) for each, status in _counted if each.name in names]
    if not resuming and (refused := [status for _, status in chosen if status.obstacle]):
        reasons = "; ".join(f"communicator {each.name}: {each.obstacle}" for each in refused)
        raise UnsupportedError(f"{reasons}; nothing was suspended")
    return chosen


def _status(each: Communicator) -> CommunicatorStatus:
    about = {"name": each.name, "ranks": each.ranks, "rank": each.rank}
    if reason := _unable(each):
        return CommunicatorStatus(**about, obstacle=reason)
    try:
        held = each.held()
    except (MemsaverError, RuntimeError) as error:
        return CommunicatorStatus(**about, obstacle=f"{error}; unset NCCL_DISABLE_MEM_MANAGER if it is set")
    off = process.core_settings().communicators == "off"
    return CommunicatorStatus(
        **about,
        suspendable_bytes=0 if held.suspended else held.suspendable,
        suspended_bytes=held.suspendable if held.suspended else 0,
        persistent_bytes=held.persistent,
        suspended=held.suspended,
        obstacle="MEMSAVER_COMMUNICATORS=off; unset it" if off else "",
    )


def _await_late(deadline: float) -> None:
    """Wait for the calls into NCCL that have not returned, if any; an earlier operation may have made them."""
    failures = []
    for name, (what, call) in tuple(_late.items()):
        try:
            call.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeoutError:
            raise MemsaverError(
                f"the {what} of communicator {name} has not returned: another rank has not called it. "
                "It is still waited for; restart the engine if that rank is gone"
            ) from None
        except (MemsaverError, RuntimeError) as error:
            failures.append(f"the {what} of communicator {name} failed: {error}")
        del _late[name]
    if failures:
        raise MemsaverError("; ".join(failures))


def _unable(each: Communicator) -> str:
    """Return why ``each`` cannot be suspended and what to do, or an empty string."""
    what, late = _late.get(each.name, ("", None))
    if late is not None and not late.done():
        return f"its {what} has not returned, because another rank has not called it"
    if not each.is_nccl:
        return ""
    if each.nccl is None:
        return "its libnccl cannot be found among the loaded libraries; use a torch with a shared libnccl"
    if each.nccl.version < SUSPENDS:
        return (
            f"NCCL {each.nccl.version_text} can neither suspend nor count it, so what it holds stays; "
            "install NCCL 2.29.7 or later"
        )
    if os.environ.get("NCCL_CUMEM_ENABLE") == "0":
        return "NCCL_CUMEM_ENABLE=0, so what it holds stays; start the engine with NCCL_CUMEM_ENABLE=1"
    return ""
