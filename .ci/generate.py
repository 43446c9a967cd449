"""Writes the files that are made from others; `make lint` checks that they are current.

python .ci/generate.py           writes them
python .ci/generate.py --check   exits with 1 if one is not current

client/keywords.py and cli/request_options.py are made from the contract.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from memsaver_core.contract.requests import (
    DEFAULT_LEASE_S,
    DrainMode,
    Fields,
    FleetMode,
    FleetRelease,
    FleetResume,
    Release,
    ResizeKvCache,
    Resume,
    Selector,
    acts_of,
)

SERVER = Path(__file__).parents[1] / "server" / "memsaver_server"
MADE_BY = "Generated from the contract by .ci/generate.py; do not edit."

#: Fields that are methods or positional arguments of the clients.
OTHERWISE = {"tags", "prepare", "dry_run", "run_async"}
#: Fields that are arguments of a fleet's methods, and those on which only its server acts.
OTHERWISE_OF_FLEET = {"tags", "selector", "operation_id", "dry_run", "wait", "run_async", "wake_on_request"}
#: Keywords of a fleet's methods that are no fields: ``mode`` for ``fleet_mode``, and ``drain`` for ``mode``.
ALIASES: dict[type[Fields], dict[str, Any]] = {
    FleetRelease: {"mode": Literal[FleetMode, DrainMode], "drain": DrainMode},
    FleetResume: {"mode": FleetMode},
}

KEYWORDS = {
    **dict.fromkeys((Release, Resume, ResizeKvCache), OTHERWISE),
    **dict.fromkeys((FleetRelease, FleetResume), OTHERWISE_OF_FLEET),
}

#: Fields that the command line sets in another way, or not.
NOT_OPTIONS = {"tags"}
NOT_OPTIONS_OF_FLEET = OTHERWISE_OF_FLEET | {"model"}
OPTIONS = {
    **dict.fromkeys((Release, Resume), NOT_OPTIONS),
    **dict.fromkeys((FleetRelease, FleetResume), NOT_OPTIONS_OF_FLEET),
    Selector: set(),
    ResizeKvCache: {"bytes", "fraction"},
}
#: What the option of a field is, unless its name, type and description say so. ``means`` is the value of a flag.
FACES: dict[str, dict[str, str]] = {
    "fleet_mode": {
        "name": "--best-effort",
        "means": "best_effort",
        "help": "On each engine by itself; those that fail are listed.",
    },
    "restore": {"metavar": "TAG=POLICY"},
    "gpus": {"metavar": "UUID"},
    "wait": {"help": "Wait for a conflicting operation to end."},
    "run_async": {"name": "--async", "help": "Return as soon as the operation has started."},
    "prepare": {"help": "Do all but moving memory, and wait for memsaver commit or the lease's end."},
    "lease_s": {"help": f"With --prepare: after how long it is undone without a commit [{DEFAULT_LEASE_S:g}]."},
}


def fields_of(model: type[Fields], otherwise: set[str]) -> dict[str, FieldInfo]:
    """Return the fields of a model but those that are given ``otherwise`` and those that a fleet refuses."""
    refused = {name for name, acts in acts_of(model).items() if acts.fleet not in ("each", "own")}
    left_out = otherwise | (refused if model in ALIASES else set())
    return {name: info for name, info in model.model_fields.items() if name not in left_out}


# -- keywords of Python ---------------------------------------------------------------------------------------------


def keywords(models: Mapping[type[Fields], set[str]]) -> str:
    """Return the source of keyword arguments: for each model its fields but those that are given otherwise."""
    made = "\n\n".join(_typed_dict(model, otherwise) for model, otherwise in models.items())
    return f'''"""Keyword arguments of the clients and of a fleet, which ``memsaver_core.contract.requests`` describes.

{MADE_BY}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypedDict

{made}
'''


def _typed_dict(model: type[Fields], otherwise: set[str]) -> str:
    types = {name: info.annotation for name, info in fields_of(model, otherwise).items()} | ALIASES.get(model, {})
    lines = [f"    {name}: {_annotation(of)} | None" for name, of in types.items()]
    if model in (Release, Resume):
        lines.append("    selector: Mapping[str, object] | None  # at a coordinator")
        lines.append("    key: str | None  # the Idempotency-Key; by default a new one")
    return "\n".join([f"class {model.__name__}Keywords(TypedDict, total=False):", *lines]) + "\n"


def _annotation(of: Any) -> str:
    """Return a type of the contract as callers write it; None is added to each."""
    if get_origin(of) in (Union, UnionType):
        return " | ".join(_annotation(each) for each in get_args(of) if each is not NoneType)
    if get_origin(of) is Literal:
        return f"Literal[{', '.join(map(repr, get_args(of)))}]"
    if get_origin(of) is Mapping:
        return "Mapping[str, str]"
    if get_origin(of) is tuple:
        return f"list[{_plain(get_args(of)[0]).__name__}]"
    if hasattr(of, "__metadata__"):
        return _annotation(of.__origin__)
    return str(of.__name__)


# -- options of the command line ------------------------------------------------------------------------------------


def options(models: dict[type[Fields], set[str]]) -> str:
    """Return the source of the command line's options, a group for each model but its fields that are set otherwise."""
    seen: dict[str, str] = {}
    made = "\n\n".join(_group(model, otherwise, seen) for model, otherwise in models.items())
    return f'''"""The options of a release, a resume and a resize. {MADE_BY}"""

from __future__ import annotations

from typing import ClassVar

import typer

from memsaver_server.cli.options import Options, pairs_of, size_of

{made}
'''


def _group(model: type[Fields], otherwise: set[str], seen: dict[str, str]) -> str:
    """``seen`` has the options of the groups before, and where they are."""
    lines, conversions = [], {}
    for name, info in fields_of(model, otherwise).items():
        of, option, conversion = _option(name, info)
        lines.append(f"    {name}: {of} = {seen.get(f'{name} {option}', option)}")
        seen.setdefault(f"{name} {option}", f"{model.__name__}.{name}")
        conversions |= {name: conversion} if conversion else {}
    made = ", ".join(f'"{name}": {conversion}' for name, conversion in conversions.items())
    head = [f"class {model.__name__}(Options):", *([f"    convert: ClassVar = {{{made}}}", ""] if made else [])]
    return "\n".join(head + lines) + "\n"


def _option(field: str, info: FieldInfo) -> tuple[str, str, str]:
    """Return the source of an option: its type, itself, and the function that converts it, if any."""
    face, of = FACES.get(field, {}), _plain(info.annotation)
    choices = get_args(of) if get_origin(of) is Literal else ()
    many = get_origin(of) in (Mapping, tuple)
    word = re.sub(r"_(s|bytes)$", "", field.removesuffix("s") if many else field).replace("_", "-")
    name = face.get("name", f"--{word}")
    shown = {"help": f"{info.description}{' Repeatable.' if many else ''}"}
    kind, default, conversion = "str | None", "None", ""
    if "means" in face or len(choices) == 1:
        kind, default, conversion = "bool", "False", f"lambda _: {face.get('means') or choices[0]!r}"
    elif of is bool and info.default is False:
        kind, default = "bool", "False"
    elif of is bool:
        kind, name = "bool | None", f"{name}/--no-{word}"
    elif choices:
        shown["metavar"] = "|".join(choices)
    elif get_origin(of) is Mapping:
        kind, conversion, shown["metavar"] = "list[str] | None", "pairs_of", "NAME=VALUE"
    elif many:
        kind = f"list[{_plain(get_args(of)[0]).__name__}] | None"
    elif field.endswith("_bytes"):
        conversion, shown["metavar"] = "size_of", "SIZE"
        shown["help"] += " 20GiB, 500MB, or a number of bytes."
    elif of in (int, float):
        kind = f"{of.__name__} | None"
        shown |= {"metavar": "SECONDS"} if field.endswith("_s") else {}
    shown |= {key: value for key, value in face.items() if key in ("help", "metavar")}
    arguments = "".join(f", {key}={value!r}" for key, value in shown.items())
    return kind, f'typer.Option({default}, "{name}"{arguments})', conversion


def _plain(of: Any) -> Any:
    """Return a type of the contract without None and bounds."""
    if get_origin(of) in (Union, UnionType):
        (of,) = (each for each in get_args(of) if each is not NoneType)
    return _plain(of.__origin__) if hasattr(of, "__metadata__") else of


def _formatted(path: Path, text: str) -> str:
    for command in (["check", "--select", "I", "--fix"], ["format"]):
        arguments = [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename", str(path), "-"]
        text = subprocess.run(arguments, input=text, stdout=subprocess.PIPE, text=True, check=True).stdout
    return text


MADE = {
    SERVER / "client" / "keywords.py": partial(keywords, KEYWORDS),
    SERVER / "cli" / "request_options.py": partial(options, OPTIONS),
}


def main() -> int:
    stale = []
    for path, make in MADE.items():
        text = _formatted(path, make())
        if "--check" not in sys.argv[1:]:
            path.write_text(text)
        elif path.read_text() != text:
            stale.append(path)
    for path in stale:
        print(f"{path} is not current: run python .ci/generate.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
