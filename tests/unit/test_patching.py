"""Wrapping functions of other projects' modules."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from memsaver_core.compat.patching import wrap, wrap_in


class Engine:
    kind = "engine"

    def call(self, number: int) -> tuple[str, int]:
        return self.kind, number

    @classmethod
    def of_class(cls, number: int) -> tuple[str, int]:
        return cls.kind, number

    @staticmethod
    def static(number: int) -> tuple[str, int]:
        return "static", number


@pytest.fixture
def engine() -> type[Engine]:
    """A class that the test may change."""
    return type("Engine", (Engine,), {name: vars(Engine)[name] for name in ("call", "of_class", "static")})


def twice(original: Any, *arguments: Any) -> Any:
    return original(*arguments[:-1], 2 * arguments[-1])


@pytest.mark.parametrize("name", ["call", "of_class", "static"])
def test_a_function_is_wrapped_once(engine: type[Engine], name: str) -> None:
    expected, _ = getattr(engine(), name)(0)
    for _ in range(2):
        wrap(engine, name, twice)
        assert getattr(engine(), name)(3) == (expected, 6)
    wrap(engine, name, twice, again=True)
    assert getattr(engine(), name)(3) == (expected, 12)


def test_a_method_of_one_object_is_wrapped_for_it_alone(engine: type[Engine]) -> None:
    one, other = engine(), engine()
    wrap(one, "call", twice)
    wrap(one, "missing", twice)
    assert (one.call(3), other.call(3)) == (("engine", 6), ("engine", 3))
    assert not hasattr(one, "missing")


def test_what_a_module_lacks_is_named_and_the_rest_wrapped(
    engine: type[Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module: Any = ModuleType("some_engine")
    module.Engine, module.function = engine, lambda number: number
    monkeypatch.setitem(sys.modules, "some_engine", module)
    wrap_in("some_engine", {"Gone.call": twice, "Engine.call": twice, "Engine.gone": twice, "function": twice})
    assert (module.Engine().call(3), module.function(3)) == (("engine", 6), 6)
    assert "no Gone in some_engine" in caplog.text
