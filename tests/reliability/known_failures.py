"""Failures that users of similar systems reported. Tests name those they guard against by `@pytest.mark.guards`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1]


class KnownFailure(NamedTuple):
    """What happened elsewhere, as the marker says it, and what must hold here."""

    happened: str
    holds: str


#: The failures by area.
KNOWN_FAILURES = {
    "Release and resume": (
        KnownFailure(
            "memory was reported free before it was free",
            "A release returns after every unmap, and the device's own count shows the freed bytes.",
        ),
        KnownFailure(
            "memory was unmapped while kernels still used it",
            "Admission is closed, requests are drained and every device is synchronized before the first unmap.",
        ),
        KnownFailure(
            "running out of memory or other resources killed the process",
            "The operation fails with an error and is undone; backups are intact, and the retry works.",
        ),
        KnownFailure(
            "a release by the engine's own call ended the server",
            "SGLang's own calls wait for requests in flight, and are repeated and undone as memsaver's are.",
        ),
        KnownFailure(
            "the stacks of kernels stayed on the device",
            "The context's stack limit is lowered with the last resident memory, and raised before any comes back.",
        ),
        KnownFailure(
            "an engine that could not sleep never generated again",
            "vLLM's scheduler, which was paused first, goes on; all workers are awake, and the caller gets the reason.",
        ),
        KnownFailure(
            "a wake-up on a device whose memory is the host's killed engine or host",
            "A backup in host memory is refused there with the reason; the policies file and discard work.",
        ),
        KnownFailure(
            "an upgrade of the engine put the other torch_memory_saver back",
            "With both installed in any order, memsaver's is used where it is asked for, and doctor says which.",
        ),
        KnownFailure("a second release or resume failed", "Repeating either one succeeds and changes nothing."),
        KnownFailure(
            "releasing everything failed after one tag had been released", "The rest is released; repeats succeed."
        ),
        KnownFailure(
            "an allocation made under a released tag broke the resume",
            "The new allocation is usable at once; the resume maps the others.",
        ),
        KnownFailure(
            "freeing a released tensor released its memory twice",
            "Its address range and its backup are freed, without a driver error.",
        ),
        KnownFailure(
            "resuming everything failed on tags that were never released",
            "Without tags, a resume brings back exactly what is released.",
        ),
        KnownFailure(
            "one of two concurrent callers was told that the operation failed",
            "Both join one operation and get its result.",
        ),
        KnownFailure(
            "a call was answered by an operation that the next in the queue undid",
            "A call joins an operation only if nothing opposite is queued behind it; else it queues or is refused.",
        ),
        KnownFailure(
            "nobody could cancel an operation that waited",
            "`DELETE /operations/{id}` and Ctrl-C cancel what has not begun to unmap or map; all is as before.",
        ),
        KnownFailure(
            "an abort waited behind the drain of another release",
            "A release with a stronger drain mode overtakes the drain of a weaker one of the same tags.",
        ),
        KnownFailure(
            "a thread or file that was missing for a moment stopped the service for ever",
            "The call is refused with 503 and nothing is kept of it; its repeat succeeds.",
        ),
        KnownFailure(
            "the caller disconnected in the middle of an operation",
            "The operation completes or is undone without the caller, and the reported state is true.",
        ),
        KnownFailure(
            "health probes confused a sleeping engine with a dead one",
            "A released engine is alive and not ready; a dead one is neither.",
        ),
        KnownFailure(
            "generation answered from memory whose content was discarded",
            "Discarded content is reported as lost and admission stays closed until it is written.",
        ),
        KnownFailure(
            "a misspelt field was ignored, and everything was released",
            "A field close to a known one is refused by name; other unknown ones are named in the answer.",
        ),
        KnownFailure(
            "one large request held up all others", "The bodies of memory calls are small; prompts have limited values."
        ),
        KnownFailure(
            "a request during sleep hung or used released memory",
            "It is refused with 503 and Retry-After, or queued if the caller or the settings ask for it.",
        ),
        KnownFailure(
            "the prefix cache pointed to discarded pages",
            "Cached prefixes are dropped together with the KV pages that hold them.",
        ),
        KnownFailure(
            "undefined KV cache pages produced NaN", "The tag `kv_cache` comes back as zeros unless told otherwise."
        ),
        KnownFailure(
            "tensors were recorded under the wrong tag",
            "A region holds what is allocated inside it and nothing else; after a nested region the outer tag applies.",
        ),
    ),
    "CUDA graphs": (
        KnownFailure(
            "replaying a graph failed after its memory was discarded",
            "The tag `cuda_graph` keeps its content unless told otherwise, and replay is correct.",
        ),
        KnownFailure("releasing a graph freed nothing", "The bytes of the graph's pool are freed, as measured."),
        KnownFailure(
            "replaying a graph with NCCL hung after a remap",
            "NCCL in use without `NCCL_GRAPH_REGISTER=0` is detected, and a warning says so.",
        ),
    ),
    "Backups": (
        KnownFailure(
            "each of several replicas pinned its own copy of the same weights",
            "With MEMSAVER_SHARED_BACKUPS a host keeps one copy, bounded as a whole and shown.",
        ),
        KnownFailure(
            "the process that had written a shared backup died",
            "The others keep it; nothing is left when the last one ends, however it ends.",
        ),
        KnownFailure("content was wrong after a restore", "Restored content is compared; damage is an error."),
        KnownFailure(
            "host memory stayed resident after a resume, or freeing it slowed the resume",
            "A retention policy bounds what is kept, and nothing is freed on the path of a resume.",
        ),
        KnownFailure("pinned memory took twice its size", "Pools are sized exactly."),
        KnownFailure("unused cached blocks were backed up too", "Only live blocks are copied."),
        KnownFailure(
            "a backup larger than host memory ended in the OOM killer",
            "It is refused with figures before anything is unmapped.",
        ),
        KnownFailure("backup files were left behind", "None remains, however the process ends, SIGKILL included."),
    ),
    "torch and the process": (
        KnownFailure(
            "running out of memory inside the allocator killed the process",
            "torch frees its caches, tries again and raises its own error.",
        ),
        KnownFailure("the process aborted at exit", "It exits cleanly, with memory released or not."),
        KnownFailure(
            "expandable segments made a release free nothing",
            "The memory is freed, or the setting is refused with a clear error.",
        ),
        KnownFailure(
            "a forked child used or damaged its parent's memory",
            "The child's calls fail with a clear error, and the parent's mappings are untouched.",
        ),
        KnownFailure(
            "sharing a tensor by CUDA IPC failed", "The error names the tensor's region; a copy can be shared."
        ),
        KnownFailure(
            "only the current device was synchronized or restored", "Every device of the operation is handled."
        ),
        KnownFailure("a nested region used the wrong pool", "The allocation is under the inner region's tag."),
    ),
    "Several processes": (
        KnownFailure("two engines on one GPU hung", "Both finish under load, with correct content."),
        KnownFailure(
            "one rank or device failed while the others went on", "All ranks and devices complete, or none does."
        ),
        KnownFailure(
            "an operation waited forever, and nothing said why",
            "Waits have deadlines, the error names the phase, and the status answers meanwhile.",
        ),
        KnownFailure("memory grew with every cycle", "Nothing grows, cycle after cycle."),
        KnownFailure(
            "a process was killed in the middle of an operation",
            "Its memory is free at once, no lock or file stays, and the next process works.",
        ),
        KnownFailure(
            "a rank did not come to a collective suspend, and the others waited for ever",
            "All ranks agree first; the call has a deadline, names the rank, and leaves nothing half suspended.",
        ),
        KnownFailure(
            "a rank was killed while memory was released, and probes went on saying that it was well",
            "It is seen within a second, without an operation: `/livez` answers 503 and names the rank.",
        ),
        KnownFailure(
            "idle NCCL communicators held gigabytes while the engine slept",
            "They are suspended with the release if NCCL can; if not, it is told what stays and what to do.",
        ),
        KnownFailure(
            "checkpointing one rank of several hung the next one",
            "All are locked before any is checkpointed, all restored before any is unlocked; each step can be undone.",
        ),
        KnownFailure(
            "a process with imported device memory was checkpointed and could never be restored",
            "It is refused before the checkpoint, with what imports the memory and what to change.",
        ),
        KnownFailure(
            "calibrated FP8 scales or adapters were wrong after a wake-up",
            "Their content is kept, whatever becomes of the KV cache.",
        ),
    ),
    "Fleets": (
        KnownFailure(
            "a fleet-wide sleep reached some engines, and there was no way back",
            "All are prepared, then all are released; or all are as before, and the answer names the one that failed.",
        ),
        KnownFailure(
            "the coordinator of a fleet ended in the middle, and engines stayed closed",
            "Engines that were only prepared open by themselves; the next coordinator finds the truth by asking.",
        ),
        KnownFailure(
            "an engine that joined a sleeping fleet late was awake, and a dead one was passed over in silence",
            "Late ones are brought to what is wanted; dead ones are in every answer, in the status and in the log.",
        ),
    ),
}

#: What the argument of a ``guards`` marker may be.
HAPPENED = [failure.happened for failures in KNOWN_FAILURES.values() for failure in failures]


def guarded_by(decorator: ast.expr) -> list[str]:
    """The failures that a decorator names, if it is ``@pytest.mark.guards(...)``."""
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.guards":
        return [ast.literal_eval(argument) for argument in decorator.args]
    return []


def guards() -> Iterator[tuple[Path, str, str]]:
    """Each test's file, its name, and a failure that it guards against."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for failure in (name for decorator in node.decorator_list for name in guarded_by(decorator)):
                    yield path.relative_to(TESTS), node.name, failure


def tests_by_failure() -> dict[str, dict[str, list[str]]]:
    """For each known failure the files with tests for it, and the tests' names."""
    found: dict[str, dict[str, list[str]]] = {happened: {} for happened in HAPPENED}
    for path, test, failure in guards():
        found[failure].setdefault(str(path), []).append(test)
    return found
