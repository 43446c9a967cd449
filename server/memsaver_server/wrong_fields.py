"""Says in one sentence what is wrong with JSON or YAML that others wrote."""

from __future__ import annotations

from pydantic import ValidationError

#: Fields that the sentence names at most.
_NAMED = 3
#: Characters of a value that are shown.
_SHOWN = 60


def wrong_fields(error: ValidationError) -> str:
    """Return which fields are wrong, what was found there and what should be."""
    errors = error.errors(include_url=False)
    more = f"; and {len(errors) - _NAMED} more" if len(errors) > _NAMED else ""
    return "; ".join(_wrong(each["type"], each["loc"], each["msg"], each["input"]) for each in errors[:_NAMED]) + more


def _wrong(kind: str, path: tuple[int | str, ...], should: str, found: object) -> str:
    name = ".".join(map(str, path)) or "the whole"
    if kind == "missing":
        return f"{name} is missing"
    if kind == "extra_forbidden":
        return f"{name} does not exist"
    if kind == "json_invalid":
        return f"it is not JSON ({should.removeprefix('Invalid JSON: ')})"
    return f"{name} is {repr(found)[:_SHOWN]}, but {should.replace('Input should', 'should')}"
