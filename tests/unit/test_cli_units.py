"""Sizes, times and rates as the command line prints and reads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsaver_server.cli.units import format_bytes, format_delta, format_seconds, like, parse_size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (512 << 20, "512 MiB"),
        (2944 << 20, "2.88 GiB"),
        (40_803 << 20, "39.8 GiB"),
        ((1 << 30) - 1, "1.00 GiB"),
        (-(3 << 30), "-3 GiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_bytes_read_with_three_digits(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_growth_carries_a_plus_sign() -> None:
    assert [format_delta(count) for count in (1 << 30, 0, -(1 << 30))] == ["+1 GiB", "0", "-1 GiB"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0004, "0.4 ms"), (0.0312, "31 ms"), (0.9994, "999 ms"), (2.346, "2.35 s"), (200.0, "3 min 20 s")],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GiB", 8 << 30),
        ("1.5 gib", 3 << 29),
        ("4194304", 4 << 20),
        ("1B", 1),
        ("2GB", 2 * 10**9),
        ("20G", 20 * 10**9),
        ("2Gi", 2 << 30),
    ],
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize(
    "text", ["", "0", "50", "0GiB", "GiB", "-1GiB", "8 parsecs", "1,5GiB", "1_000", "inf", "٣GiB", "99999999TiB"]
)
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="8GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("asked", "told"), [("1TiB", "0.002441 TiB"), ("9 GB", "2.684 GB"), ("3000M", "2684 M"), ("77", "2684354560 bytes")]
)
def test_a_size_is_told_in_the_unit_that_was_asked_in(asked: str, told: str) -> None:
    assert like(asked, 5 << 29) == told


@given(st.integers(min_value=1, max_value=1 << 50))
def test_what_is_printed_reads_back_within_a_half_percent(count: int) -> None:
    assert parse_size(format_bytes(count)) == pytest.approx(count, rel=0.006)
