"""Numbers in the columns of a table, where the heading has the unit. What is not zero is never shown as zero."""

from __future__ import annotations

from collections.abc import Sequence

from nanum.units import GB, GIB, format_seconds, format_seconds_between

UNKNOWN = "?"
LESS_THAN_A_SHARE = "a GPU has less to do than its share of one GPU's work, such as gradients to add up"
"""Why a serial fraction is below 0. Where gradients and weights are sharded, a GPU adds up and casts its own alone, in
each micro-batch, and one GPU those of all."""


def gib(count_bytes: float | None) -> str:
    """Memory, in GiB: `12.34`."""
    return _decimals(count_bytes, GIB, 2)


def gigabytes(count_bytes: float | None) -> str:
    """A message, in the GB that links are quoted in: `3.41`, `1,129`."""
    places = 3 if count_bytes is None or count_bytes < GB else 2 if count_bytes < 10 * GB else 1
    return _decimals(count_bytes, GB, places if count_bytes is None or count_bytes < 100 * GB else 0)


def duration(seconds: float | None) -> str:
    """A time with its unit: `12.4 ms`."""
    return UNKNOWN if seconds is None else format_seconds(seconds)


def span(low: float, high: float) -> str:
    """Least and most of a time: `58.9–74.1 s`."""
    return format_seconds_between(low, high)


def percent(fraction: float | None) -> str:
    """A fraction as `41.3%`."""
    return UNKNOWN if fraction is None else f"{fraction:.1%}"


def fraction(serial_fraction: float) -> str:
    """A serial fraction, to the digits that count, for its limit is its inverse: `0.0123`, `-0.000307`."""
    if serial_fraction == 0:
        return "0"
    return f"{serial_fraction:.3g}" if abs(serial_fraction) < 1e-3 else f"{serial_fraction:.4f}"


def whole(number: float | None) -> str:
    """A count, to the unit: `8,030,261,248`."""
    return UNKNOWN if number is None else f"{number:,.0f}"


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 3, 7] as `0-3, 7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _decimals(value: float | None, unit: float, places: int) -> str:
    if value is None:
        return UNKNOWN
    if value == 0:
        return "0"
    scaled, least = value / unit, 10.0**-places
    return f"<{least:.{places}f}" if 0 < scaled < least / 2 else f"{scaled:,.{places}f}"
