"""The base of the contract's models, and what several of them say together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict


class Model(BaseModel):
    """Frozen. Each class is built at its first use: a command imports all of them and uses few."""

    model_config = ConfigDict(frozen=True, defer_build=True)


ModelT = TypeVar("ModelT", bound=Model)


def common(words: Iterable[str]) -> str:
    """Return the word that all are, ``mixed`` if they differ, or an empty string if there are none."""
    found = set(words)
    return "mixed" if len(found) > 1 else "".join(found)


def summed(rows: Sequence[ModelT]) -> ModelT:
    """Return ``rows``, at least one, as one: numbers are added up, also those of the same key in mappings; a flag is
    set if it is in all; words are ``common``; everything else is as in the first."""
    sums: dict[str, Any] = {}
    for name in type(rows[0]).model_fields:
        values = [getattr(row, name) for row in rows]
        if isinstance(values[0], bool):
            sums[name] = all(values)
        elif isinstance(values[0], int):
            sums[name] = sum(values)
        elif isinstance(values[0], str):
            sums[name] = common(values)
        elif isinstance(values[0], Mapping):
            total: Counter[Any] = Counter()
            for value in values:
                total.update(value)
            sums[name] = dict(total)
    return rows[0].model_copy(update=sums)


def summed_by(rows: Iterable[ModelT], *names: str) -> tuple[ModelT, ...]:
    """Return the ``summed`` rows of each group that have the fields ``names`` in common; groups as they come first."""
    groups: dict[tuple[Any, ...], list[ModelT]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
    return tuple(map(summed, groups.values()))
