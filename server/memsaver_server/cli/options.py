"""Groups of options that several commands take, and the exit codes. Imports no package but typer: help is quick."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import wraps
from typing import Annotated, Any, ClassVar, get_type_hints

import typer
from typer.models import OptionInfo

from memsaver_server.address import DEFAULT_URL
from memsaver_server.cli.units import parse_size


class Options:
    """A group of options: each annotated attribute whose value is a ``typer.Option``. ``convert`` has, by option, the
    function that converts what a user writes."""

    convert: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}

    def __init__(self, **values: Any) -> None:
        self.__dict__ |= values

    @classmethod
    def types(cls) -> dict[str, Any]:
        return {name: of for name, of in get_type_hints(cls).items() if isinstance(getattr(cls, name), OptionInfo)}

    def given(self) -> dict[str, Any]:
        """Return what the user has set; raise BadParameter if it cannot be converted, or is infinite or no number."""
        given = {}
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise typer.BadParameter(f"{value} is not a number; leave the option out, or write for example 3600")
            if value not in (None, [], getattr(type(self), name).default):
                given[name] = self.convert[name](value) if name in self.convert else value
        return given


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes, one by one, the options of those parameters of ``command`` that are groups."""
    groups: dict[str, type[Options]] = {}
    taken: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        of, keyword = parameter.annotation, parameter.replace(kind=parameter.KEYWORD_ONLY)
        if isinstance(of, type) and issubclass(of, Options):
            groups[name] = of
            for option, its in of.types().items():
                taken[option] = keyword.replace(name=option, default=getattr(of, option), annotation=its)
        else:
            taken[name] = keyword

    @wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{option: values.pop(option) for option in group.types()})
        command(**values)

    run.__signature__ = inspect.Signature([*taken.values()])  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in taken.items()}
    return run


class Connection(Options):
    """Where the service is."""

    url: str = typer.Option(
        DEFAULT_URL,
        envvar="MEMSAVER_URL",
        help="Address of the service: host:port, a URL, or unix:///path.",
        metavar="URL",
    )
    uds: str | None = typer.Option(None, help="Unix socket of the service, instead of --url.", metavar="PATH")
    api_key: str | None = typer.Option(
        None, envvar="MEMSAVER_API_KEY", help="Key of the service.", metavar="KEY", show_envvar=True
    )


Json = Annotated[bool, typer.Option("--json", help="Print the service's JSON instead of tables.")]
Tags = Annotated[
    list[str] | None, typer.Argument(help="Tags, e.g. weights kv_cache. Default: all.", show_default=False)
]
Interval = Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between updates.", metavar="SECONDS")]


def pairs_of(texts: list[str]) -> dict[str, str]:
    """Return ``NAME=VALUE``, several times, as a mapping; raise BadParameter if one of them is something else."""
    for text in texts:
        name, separator, _ = text.partition("=")
        if not (name and separator):
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE; write for example weights=discard or role=rollout")
    return dict(text.split("=", 1) for text in texts)


def size_of(text: str | None) -> int | None:
    """Return the bytes of an option's value; raise BadParameter if it is not a size."""
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


class ExitCode(IntEnum):
    """The exit codes; 2 is also that of a wrong option or argument."""

    OK = 0
    FAILED = 1
    INVALID = 2
    UNREACHABLE = 3
    UNAUTHORIZED = 4
    CONFLICT = 5
    OUT_OF_MEMORY = 6
    DEADLINE = 7
    NOT_NOW = 8
    INTERRUPTED = 130
