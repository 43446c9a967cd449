"""A run of ``served.py``: an engine that is served, or a co-tenant, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.native import injection
from tests.programs import Child

PROMPT = {"input_ids": [3, 5, 8], "sampling_params": {"max_new_tokens": 6, "temperature": 0}}


class Program(Child):
    """A run of ``served.py``, and its first line of output."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        super().__init__(str(Path(__file__).with_name("served.py")), *arguments, **injection.in_child(), **environment)
        self.said = self.read_line()
        assert self.said, "the program did not start"

    def fail(self, call: str, kind: str) -> None:
        """Make the next ``call`` of its driver fail."""
        self.ask(f"fail {call} {kind}")

    def hold(self, call: str) -> None:
        """From now on ``call`` of its driver stands still, until ``heal``."""
        self.ask(f"hold {call}")

    def heal(self) -> None:
        """Forget what ``fail`` and ``hold`` planned; what stands still goes on."""
        self.ask("heal")

    def count(self, call: str) -> int:
        """How often ``call`` of its driver was made so far."""
        return int(self.ask(f"count {call}"))

    def wait_for(self, call: str, more_than: int) -> None:
        """Return when ``call`` of its driver was made more often than that."""
        while self.count(call) <= more_than:
            pass


def client(program: Program) -> httpx.Client:
    """A client of a served engine. It waits for no answer for ever."""
    return httpx.Client(base_url=program.said, timeout=60)


def tokens(http: httpx.Client) -> list[int]:
    return http.post("/generate", json=PROMPT).raise_for_status().json()["output_ids"]
