"""What is tried at every door by which memory is released or resumed: each way to send fields, and each field."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from .engines import Site
from .scenario import ABSENT

Fields = Mapping[str, Any]
#: A query, or the line of a request, and a body.
Way = tuple[str, Any]

#: Ways to send fields.
WAYS: tuple[Way, ...] = (
    ("", ABSENT),
    ("", b""),
    ("", b" \n"),
    ("", None),
    ("", {}),
    ("", {"tags": None}),
    ("", {"tags": []}),
    ("", {"tags": ["kv_cache"]}),
    ("", {"tags": ["weights", "kv_cache", "weights"]}),
    ("", {"tags": ["kv_cache"], "timeout_s": None, "mode": None, "wait": None}),
    ("?tags=kv_cache", ABSENT),
    ("?tags=kv_cache&tags=weights", {}),
    ("?tags=weights", {"tags": ["kv_cache"]}),
    ("?tags=weights", {"tags": None}),
    ("?tags=", ABSENT),
    ("?dry_run=1", ABSENT),
    ("?dry_run=true", {"dry_run": False}),
    ("", []),
    ("", ["kv_cache"]),
    ("", "kv_cache"),
    ("", 7),
    ("", b"{"),
    ("", b"tags=kv_cache"),
    ("", {"tags": "kv_cache"}),
    ("", {"tags": [1]}),
    ("", {"tags": ["no_such_tag", "kv_cache"]}),
    ("", {"tags": ["cuda_graph", "communicators"]}),
    ("", {"tagz": ["kv_cache"]}),
    ("?tag=kv_cache", {}),
    ("", {"colour": "red", "b": None}),
    ("?colour=red", {"shape": 1}),
    ("", {"rid": "1", "reset_connector": True, "http_worker_ipc": None}),
)
#: Fewer, for doors that read fields as another one does.
FREQUENT = (*WAYS[:1], *WAYS[4:8], *WAYS[10:13], *WAYS[20:22], *WAYS[26:])
#: Fewer still.
FEW = (WAYS[0], WAYS[5], WAYS[11], WAYS[12], WAYS[20], WAYS[27], WAYS[29])

#: Each field of any door, with an allowed value. A door is sent all of them, also those that it does not have.
FIELDS: tuple[Fields, ...] = (
    {"timeout_s": 5},
    {"mode": "abort"},
    {"restore": {"weights": "discard"}},
    {"at_least_bytes": 1},
    {"trim": True},
    {"hibernate": True},
    {"hibernate": True, "trim": False},
    {"verify": "token"},
    {"dry_run": True},
    {"wait": True},
    {"async": True},
    {"prepare": True},
    {"prepare": True, "lease_s": 60},
    {"lease_s": 60},
    {"commit": "no-such-id"},
    {"wait_for_memory_s": 1},
    {"level": 2},
    {"tags": ["model", "kv_cache"]},
    {"selector": {"names": ["b"]}},
    {"model": "model of b"},
    {"fleet_mode": "best_effort"},
    {"operation_id": "named-by-its-caller"},
    {"wake_on_request": True},
    {"dp_ranks": [0, 2]},
)
#: Those of the doors of vLLM and Ray Serve.
SLEEP_FIELDS: tuple[Fields, ...] = (
    {"level": 0},
    {"level": 3},
    {"tags": ["scheduling"]},
    {"options": {"level": 2, "tags": ["kv_cache"]}},
)
#: Other values and combinations.
VARIANTS: tuple[Fields, ...] = (
    {"timeout_s": 0},
    {"mode": "wait"},
    {"mode": "keep"},
    {"restore": {}},
    {"restore": {"weights": "file", "kv_cache": "host"}},
    {"tags": ["weights"], "restore": {"kv_cache": "host"}},
    {"restore": {"no_such_tag": "host"}},
    {"at_least_bytes": 320 << 10},
    {"at_least_bytes": 1 << 10, "tags": ["weights", "workspace"]},
    {"at_least_bytes": 1 << 40},
    {"trim": False},
    {"hibernate": False, "prepare": False, "verify": None},
    {"dry_run": True, "tags": ["kv_cache"], "restore": {"kv_cache": "host"}},
    {"dry_run": True, "at_least_bytes": 1, "hibernate": True},
    {"run_async": True},
    {"prepare": True, "async": True},
    {"prepare": True, "dry_run": True},
    {"commit": "no-such-id", "tags": ["kv_cache"]},
    {"level": 1},
    {"level": 2, "tags": ["kv_cache"]},
    {"level": 2, "dry_run": True},
    {"tags": ["model_weights"]},
)

#: Values that no door may accept.
WRONG: tuple[Fields, ...] = (
    {"tags": {"weights": True}},
    {"tags": ["x" * 257]},
    {"timeout_s": "soon"},
    {"timeout_s": -1},
    {"timeout_s": 86401},
    {"mode": "sideways"},
    {"mode": 1},
    {"restore": "host"},
    {"restore": {"weights": "tape"}},
    {"restore": {"weights": None}},
    {"at_least_bytes": 0},
    {"at_least_bytes": "much"},
    {"trim": "perhaps"},
    {"hibernate": "perhaps"},
    {"verify": "everything"},
    {"dry_run": "perhaps"},
    {"wait": [1]},
    {"async": "perhaps"},
    {"prepare": "perhaps"},
    {"prepare": True, "lease_s": 0},
    {"prepare": True, "lease_s": 3601},
    {"commit": 7},
    {"wait_for_memory_s": -1},
    {"level": 4},
    {"level": "deep"},
    {"selector": {"nams": ["a"]}},
    {"selector": {"names": ["z"]}},
    {"model": 7},
    {"fleet_mode": "some"},
    {"operation_id": "with a space"},
    {"timeout_s": -1, "mode": "sideways", "colour": "red"},
)


def tried(path: str, ways: Iterable[Way], fields: Iterable[Fields]) -> Iterator[Way]:
    """Yield what is tried at a door: the line of the request and its body."""
    for query, body in ways:
        yield f"POST {path}{query}", body
    for each in fields:
        yield f"POST {path}", each


#: States between which ``walk`` goes.
RESIDENT, RELEASED = "resident", "released cuda_graph kv_cache weights workspace"
#: Fields of a release that a later resume shows.
TRACES = ("restore", "verify")


class Door:
    """A door at which much is tried.

    Args:
        needed: fields without which it does nothing.
        first: whether its first call, without other fields, is recorded as a whole.
    """

    def __init__(self, path: str, tries: Iterable[Way], needed: Fields = MappingProxyType({})) -> None:
        self.path = path
        self.left = deque([(f"POST {path}", needed or ABSENT), *tries])
        self.steps: list[Any] = []
        self._needed = needed

    def next(self) -> Way:
        """Take what is tried next."""
        line, body = self.left.popleft()
        return line, {**self._needed, **body} if isinstance(body, dict) else body

    def recording(self) -> dict[str, Any]:
        """What was found: the first call as a whole, and the outcomes of the others."""
        first, *others = self.steps
        return {"whole": first, "outcomes": outcomes(others, self.path)}


def walk(site: Site, releasing: Door, resuming: Door) -> None:
    """Try everything at both doors: at ``releasing`` with all memory resident, at ``resuming`` with all released.

    What one does to all memory the other undoes, so that most tries need no preparation.
    """
    doors = {RESIDENT: releasing, RELEASED: resuming}
    now = ""  # the state, if what was tried has left no other trace than it
    while releasing.left or resuming.left:
        before = next(state for state in (now, RESIDENT, RELEASED) if state in doors and doors[state].left)
        door = doors[before]
        line, body = door.next()
        if before != now or "verify" in str(body):
            site.bring(before)
        scenario = site.scenario(keep=True)
        scenario.call(line, body, whole=not door.steps)
        door.steps += scenario.steps
        now = site.last if site.last == before or not any(word in str(body) for word in TRACES) else ""


def outcomes(steps: Iterable[Any], path: str) -> list[Any]:
    """Return each different outcome of ``steps`` at the door ``path``, with the requests that have it.

    A field that does nothing stands beside the request without fields.
    """
    found: dict[str, Any] = {}
    for step in steps:
        outcome = {name: each for name, each in step.items() if name != "request"}
        same = found.setdefault(json.dumps(outcome, sort_keys=True), {"requests": [], **outcome})
        line, *sent = step["request"]
        same["requests"].append([line.replace(f" {path}", ""), *sent])
    return list(found.values())
