"""Random programs as data and as text, and those that failed once because of the model or the saver."""

from __future__ import annotations

import ast
import errno
from collections.abc import Sequence
from typing import Any

from tests.reliability.faults import Fault

#: The steps by name, with their arguments.
Program = Sequence[tuple[str, dict[str, Any]]]


def written(program: Program) -> str:
    """A program as text, one step per line."""
    return "".join(f"{each},\n" for each in program)


def read(text: str) -> Program:
    """A program from such text."""
    program: Program = ast.literal_eval(f"[{text}]")
    return program


def _allocate(tag: str, policy: str, *pages: int) -> tuple[str, dict[str, Any]]:
    return ("allocate", {"kind": (tag, policy, 0), "pages": list(pages), "content": "random", "faults": []})


def _release(*tags: str, faults: Sequence[Fault] = (), **overrides: str) -> tuple[str, dict[str, Any]]:
    return ("release", {"tags": list(tags), "overrides": overrides, "faults": list(faults)})


def _resume(*tags: str, faults: Sequence[Fault] = ()) -> tuple[str, dict[str, Any]]:
    return ("resume", {"tags": list(tags), "faults": list(faults)})


_UNMAP: Fault = ("unmap", "invalid_value", 1, 1)
_NO_UNDO: Fault = ("create", "invalid_value", 1, 9)
#: Some chunks of kept content are released, the others resident.
_HALF_RELEASED: Program = [
    _allocate("a", "host", 3, 34),
    _release(),
    _resume(),
    _release(faults=[("unmap", "invalid_value", 2, 1), _NO_UNDO]),
]
#: The same with an allocation in the space of two freed ones, across the chunks of both.
_ACROSS_CHUNKS: Program = [
    _allocate("a", "host", 3, 3, 6, 3),
    _release(),
    _resume(),
    *[("free", {"which": 1, "faults": []})] * 2,
    _allocate("a", "host", 9),
    _release(faults=[("unmap", "invalid_value", 2, 1), _NO_UNDO]),
]

#: They run before the random ones.
KNOWN: dict[str, Program] = {
    "kept by an override, resumed and discarded": [
        _allocate("weights", "discard", 2),
        _release("weights", weights="host"),
        _resume("weights"),
        _release("weights"),
    ],
    "a release that fails beside a tag that is released already": [
        _allocate("a", "zero", 2),
        _allocate("b", "zero", 2),
        _release("a"),
        _release(faults=[_UNMAP]),
    ],
    "a release that fails when there is no memory to resume what was released before": [
        _allocate("a", "zero", 200),
        _release("a"),
        _allocate("a", "zero", 20),
        ("tenant_takes", {"pages": 482}),
        _release(faults=[_UNMAP]),
    ],
    "a release fails half way, and then the rest goes as zeros": [
        *_HALF_RELEASED,
        _release(a="zero"),
        _resume(),
    ],
    "a release fails half way, and the rest is written to": [
        *_HALF_RELEASED,
        ("write", {"which": 1, "first": 0, "pages": 40, "content": "random"}),
        _resume(),
    ],
    "a release fails half way inside of an allocation, and the rest is written to": [
        *_ACROSS_CHUNKS,
        ("write", {"which": 2, "first": 0, "pages": 40, "content": "random"}),
        _resume(),
    ],
    "a release fails half way, and the rest is written to, and released": [
        *_ACROSS_CHUNKS,
        ("write", {"which": 2, "first": 0, "pages": 40, "content": "random"}),
        _release(),
        _resume(),
    ],
    "a release fails half way, then the rest goes, and a backup is damaged": [
        *_ACROSS_CHUNKS,
        _release(),
        ("damage_a_backup", {"which": 2, "page": 1}),
        _resume(),
    ],
    "a release fails half way, what it released cannot be read, and then the rest goes as zeros": [
        _allocate("a", "file", 3, 34),
        _release(),
        _resume(),
        _release(faults=[("unmap", "invalid_value", 2, 1), ("pread", errno.EIO, 1, 1)]),
        _release(a="zero"),
        _resume(),
    ],
    "the devices cannot be read after a resume": [
        _allocate("a", "zero", 2),
        _release(),
        _resume(faults=[("memory_info", "invalid_value", 6, 1)]),
    ],
    "a growth that failed, and later none": [
        _allocate("a", "host", 34),
        ("prepare_backup", {"wait": True, "faults": [("register_host", "invalid_value", 1, 1)]}),
        ("free", {"which": 0, "faults": []}),
        ("drop_backups", {"tags": [], "faults": []}),
        ("prepare_backup", {"wait": True, "faults": []}),
    ],
    "freed twice while a release stands still": [
        _allocate("a", "host", 2),
        (
            "operate_while_another_works",
            {
                "operation": "release",
                "tags": [],
                "overrides": {},
                "hold": "copy_to_host",
                "work": [("free_twice", 0)],
                "faults": [],
            },
        ),
    ],
    "damaged, given up, and freed while that release stands still": [
        _allocate("b", "host", 2, 3),
        _release(),
        ("damage_a_backup", {"which": 0, "page": 0}),
        _resume(),
        _allocate("a", "host", 2),
        (
            "operate_while_another_works",
            {
                "operation": "release",
                "tags": [],
                "overrides": {"b": "zero"},
                "hold": "copy_to_host",
                "work": [("free", 0)],
                "faults": [],
            },
        ),
        _resume(),
    ],
    "kept by an override, and freed": [
        _allocate("b", "discard", 1),
        _release(b="host"),
        _resume(),
        ("free", {"which": 0, "faults": []}),
    ],
    "more in all than the device has": [
        _allocate("a", "zero", *[50] * 8),
        _release(),
        _allocate("a", "zero", *[50] * 8),
    ],
    "an undone release whose own undo the driver refuses": [
        (
            "begin",
            {
                "seed": 326,
                "kinds": [
                    (("weights", "host", 1), [35, 7, 5, 2, 5]),
                    (("weights", "host", 0), [6, 5, 4, 6, 2]),
                    (("weights", "file", 0), [30, 25, 4, 2, 6]),
                    (("weights", "file", 0), [34]),
                ],
            },
        ),
        (
            "release_in_part",
            {
                "tags": ["b", "kv_cache", "weights"],
                "overrides": {},
                "write": False,
                "again": {},
                "faults": [("record", "invalid_value", 1, 1), ("record", "invalid_value", 1, 1)],
            },
        ),
        (
            "release_in_part",
            {
                "tags": [],
                "overrides": {},
                "write": False,
                "again": None,
                "faults": [("unmap", "invalid_value", 12, 3), ("record", "invalid_value", 12, 3)],
            },
        ),
    ],
}
