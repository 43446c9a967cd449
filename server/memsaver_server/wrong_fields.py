"""Says in one sentence what is wrong with JSON or YAML that others wrote."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import ValidationError
from pydantic_core import ErrorDetails

#: Characters of a value that are shown.
_SHOWN = 60


def _wrong(error: ErrorDetails) -> str:
    kind, should, name = error["type"], error["msg"], ".".join(map(str, error["loc"])) or "the whole"
    if kind == "missing":
        return f"{name} is missing"
    if kind == "extra_forbidden":
        return f"{name} does not exist"
    if kind == "json_invalid":
        return f"it is not JSON ({should.removeprefix('Invalid JSON: ')})"
    return f"{name} is {repr(error['input'])[:_SHOWN]}, but {should.replace('Input should', 'should')}"


def wrong_fields(error: ValidationError, named: int = 3, sentence: Callable[[ErrorDetails], str] = _wrong) -> str:
    """Return which fields are wrong, ``named`` at most: by default what was found there and what should be, else what
    ``sentence`` makes of each."""
    errors = error.errors(include_url=False)
    more = f"; and {len(errors) - named} more" if len(errors) > named else ""
    return "; ".join(map(sentence, errors[:named])) + more
