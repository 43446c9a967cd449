"""Runs ``served.py``: a served engine, or a co-tenant, in a child process."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.native import injection
from tests.programs import Child
from tests.waiting import wait_until

PROMPT = {"input_ids": [3, 5, 8], "sampling_params": {"max_new_tokens": 6, "temperature": 0}}


class Program(Child):
    """A run of ``served.py``, with its first line of output."""

    def __init__(self, *arguments: str, by_itself: bool = False, **environment: str) -> None:
        program = str(Path(__file__).with_name("served.py"))
        super().__init__(program, *arguments, by_itself=by_itself, **injection.in_child(), **environment)
        self.said = self.read_line()
        assert self.said, "the program did not start"

    def fail(self, call: str, kind: str) -> None:
        """Make the next ``call`` of its driver fail."""
        self.ask(f"fail {call} {kind}")

    def hold(self, call: str) -> None:
        """From now on, hold ``call`` of its driver until ``heal``."""
        self.ask(f"hold {call}")

    def heal(self) -> None:
        """Undo ``fail`` and ``hold``; held calls continue."""
        self.ask("heal")

    def count(self, call: str) -> int:
        """How often its driver's ``call`` was called so far."""
        return int(self.ask(f"count {call}"))

    def wait_for(self, call: str, more_than: int) -> None:
        """Return once its driver's ``call`` was called more often than that."""
        wait_until(lambda: self.count(call) > more_than, interval_s=0.001)


def client(program: Program) -> httpx.Client:
    """A client of a served engine, with a timeout."""
    return httpx.Client(base_url=program.said, timeout=600, verify=False)


def tokens(http: httpx.Client) -> list[int]:
    return http.post("/generate", json=PROMPT).raise_for_status().json()["output_ids"]
