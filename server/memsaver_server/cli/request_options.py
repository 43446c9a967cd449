"""The options of a release, a resume and a resize. Generated from the contract by .ci/generate.py; do not edit."""

from __future__ import annotations

from typing import ClassVar

import typer

from memsaver_server.cli.options import Options, pairs_of, size_of


class Release(Options):
    convert: ClassVar = {"verify": lambda _: "token", "restore": pairs_of, "at_least_bytes": size_of}

    dry_run: bool = typer.Option(False, "--dry-run", help="Only say what would happen and what it would take.")
    wait: bool = typer.Option(False, "--wait", help="Wait for a conflicting operation to end.")
    run_async: bool = typer.Option(False, "--async", help="Return as soon as the operation has started.")
    verify: bool = typer.Option(
        False, "--verify", help="The tokens of a fixed prompt must be the same before and after."
    )
    prepare: bool = typer.Option(
        False, "--prepare", help="Do all but moving memory, and wait for memsaver commit or the lease's end."
    )
    lease_s: float | None = typer.Option(
        None, "--lease", help="With --prepare: after how long it is undone without a commit [30].", metavar="SECONDS"
    )
    dp_ranks: list[int] | None = typer.Option(
        None,
        "--dp-rank",
        help="Which of the server's data-parallel engines, by rank; absent or empty: all. Repeatable.",
    )
    restore: list[str] | None = typer.Option(
        None, "--restore", help="Restore policies by tag, for this release only. Repeatable.", metavar="TAG=POLICY"
    )
    trim: bool | None = typer.Option(
        None, "--trim/--no-trim", help="Also release what libraries cache; by default only when hibernating."
    )
    hibernate: bool = typer.Option(False, "--hibernate", help="Release the CUDA context last; any resume restores it.")
    communicators: str | None = typer.Option(
        None,
        "--communicators",
        help="suspend: NCCL's memory goes, too; keep: it stays, which is faster. See MEMSAVER_COMMUNICATORS.",
        metavar="suspend|keep",
    )
    timeout_s: float | None = typer.Option(
        None,
        "--timeout",
        help="Deadline of the drain; by default MEMSAVER_DRAIN_TIMEOUT_S, for a fleet 60.",
        metavar="SECONDS",
    )
    mode: str | None = typer.Option(
        None,
        "--mode",
        help="Requests in flight: wait for them, abort them, or keep (freeze) them.",
        metavar="wait|abort|keep",
    )
    at_least_bytes: str | None = typer.Option(
        None,
        "--at-least",
        help="Release only as many tags as free this much, cheapest first. 20GiB, 500MB, or a number of bytes.",
        metavar="SIZE",
    )


class Resume(Options):
    convert: ClassVar = {"verify": lambda _: "token"}

    dry_run: bool = Release.dry_run
    wait: bool = Release.wait
    run_async: bool = Release.run_async
    verify: bool = Release.verify
    prepare: bool = Release.prepare
    lease_s: float | None = Release.lease_s
    dp_ranks: list[int] | None = Release.dp_ranks
    wait_for_memory_s: float | None = typer.Option(
        None, "--wait-for-memory", help="How long to wait until other processes free device memory.", metavar="SECONDS"
    )
    weights_version: str | None = typer.Option(
        None, "--weights-version", help="Fail unless the last update of the weights named this version."
    )
    kv_cache: str | None = typer.Option(
        None,
        "--kv-cache",
        help="If memory is short after the wait: fail, or resume with a smaller KV cache.",
        metavar="whole|shrink",
    )


class FleetRelease(Options):
    convert: ClassVar = {"fleet_mode": lambda _: "best_effort", "verify": lambda _: "token", "restore": pairs_of}

    fleet_mode: bool = typer.Option(
        False, "--best-effort", help="On each engine by itself; those that fail are listed."
    )
    verify: bool = Release.verify
    restore: list[str] | None = Release.restore
    trim: bool | None = Release.trim
    hibernate: bool = Release.hibernate
    communicators: str | None = Release.communicators
    timeout_s: float | None = Release.timeout_s
    mode: str | None = Release.mode


class FleetResume(Options):
    convert: ClassVar = {"fleet_mode": lambda _: "best_effort", "verify": lambda _: "token"}

    fleet_mode: bool = FleetRelease.fleet_mode
    verify: bool = Release.verify
    wait_for_memory_s: float | None = Resume.wait_for_memory_s
    weights_version: str | None = Resume.weights_version
    kv_cache: str | None = Resume.kv_cache
    timeout_s: float | None = typer.Option(
        None,
        "--timeout",
        help="How long an engine may take to prepare, not counting its wait for memory.",
        metavar="SECONDS",
    )


class Selector(Options):
    convert: ClassVar = {"labels": pairs_of}

    names: list[str] | None = typer.Option(None, "--name", help="Names of members. Repeatable.")
    models: list[str] | None = typer.Option(None, "--model", help="What the engines serve. Repeatable.")
    labels: list[str] | None = typer.Option(
        None, "--label", help="Labels that a member must have, with these values. Repeatable.", metavar="NAME=VALUE"
    )
    hosts: list[str] | None = typer.Option(None, "--host", help="Hosts on which the engines run. Repeatable.")
    gpus: list[str] | None = typer.Option(
        None, "--gpu", help="UUIDs; an engine matches if it uses one of them. Repeatable.", metavar="UUID"
    )


class ResizeKvCache(Options):
    dry_run: bool = Release.dry_run
    wait: bool = Release.wait
    run_async: bool = Release.run_async
    tokens: int | None = typer.Option(None, "--tokens", help="Room for at least so many tokens.")
    mode: str | None = typer.Option(
        None,
        "--mode",
        help="Requests that use pages to be given back: wait for their end, or preempt them.",
        metavar="wait|preempt",
    )
    timeout_s: float | None = typer.Option(
        None, "--timeout", help="Deadline of that wait; by default MEMSAVER_DRAIN_TIMEOUT_S.", metavar="SECONDS"
    )
    wait_for_memory_s: float | None = typer.Option(
        None,
        "--wait-for-memory",
        help="How long to wait until other processes free the device memory to grow.",
        metavar="SECONDS",
    )
