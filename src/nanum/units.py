"""The only place that knows 10⁹ from 2³⁰. Inside, everything is SI; people's units are read and printed here.

Memory prints in GiB and says so, link speeds in GB/s; a network's line rate may be read in Gb/s, its own convention.
"""

from __future__ import annotations

import math
import re
from typing import Literal

KB, MB, GB, TB, PB = 10**3, 10**6, 10**9, 10**12, 10**15
KIB, MIB, GIB, TIB, PIB = 2**10, 2**20, 2**30, 2**40, 2**50
GFLOPS, TFLOPS, PFLOPS = 1e9, 1e12, 1e15
MICROSECOND, MILLISECOND = 1e-6, 1e-3
BITS_PER_BYTE = 8
LARGEST = 10_000_000
"""The largest whole number that is read: 10^7 GPUs, sequences, or tokens in a sequence are beyond any machine."""

Dimension = Literal["bytes", "bytes_per_second", "flops_per_second", "seconds", "ratio", "count"]

_BYTES: dict[str, float] = {
    "B": 1, "bytes": 1,
    "kB": KB, "KB": KB, "MB": MB, "GB": GB, "TB": TB, "PB": PB,
    "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB, "PiB": PIB,
}  # fmt: skip
_BITS: dict[str, float] = {"b": 1, "kb": KB, "Kb": KB, "Mb": MB, "Gb": GB, "Tb": TB}

_UNITS: dict[Dimension, dict[str, float]] = {
    "bytes": _BYTES,
    "bytes_per_second": (
        {f"{unit}/s": scale for unit, scale in _BYTES.items()}
        | {f"{unit}/s": scale / BITS_PER_BYTE for unit, scale in _BITS.items()}
        | {f"{unit}ps": scale / BITS_PER_BYTE for unit, scale in _BITS.items()}
        | {f"{unit}it/s": scale / BITS_PER_BYTE for unit, scale in _BITS.items()}
    ),
    "flops_per_second": {
        f"{prefix}{word}": scale
        for prefix, scale in (("", 1.0), ("G", GFLOPS), ("T", TFLOPS), ("P", PFLOPS), ("E", 1e18))
        for word in ("FLOPS", "FLOP/s", "FLOPs/s")
    },
    "seconds": {"s": 1.0, "ms": MILLISECOND, "us": MICROSECOND, "µs": MICROSECOND, "μs": MICROSECOND, "ns": 1e-9},
    "ratio": {"": 1.0, "%": 0.01},
    "count": {"": 1.0},
}
_EXAMPLE: dict[Dimension, str] = {
    "bytes": "80 GiB or 81559 MiB",
    "bytes_per_second": "400 Gb/s or 900 GB/s",
    "flops_per_second": "989 TFLOPS",
    "seconds": "3.5 us",
    "ratio": "0.8 or 80 %",
    "count": "132",
}
_NUMBER_AND_UNIT = re.compile(
    r"\s*([+-]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[+-]?\d+)?|[+-]?nan|[+-]?inf(?:inity)?)\s*(.*?)\s*", re.IGNORECASE
)


_LONGER: dict[str, float] = {"d": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0}
_DURATION = re.compile(r"\s*(?=[0-9])" + "".join(rf"(?:([0-9,]+) ?{unit}\s*)?" for unit in _LONGER))
_GROUPED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(?!\d|,)")


def parse(text: str, dimension: Dimension) -> float:
    """`text`, a number and a unit such as `400 Gb/s`, `80GiB`, `3.5 us` or `1 min 16 s`, in the SI unit of `dimension`.

    Case tells bits from bytes (`Gb/s` is an eighth of `GB/s`). Raises ValueError, in the user's words, when there is no
    number or no unit of that dimension, and when the number is NaN, infinite or negative.
    """
    if dimension == "seconds" and (parts := _DURATION.fullmatch(text)):  # as `format_seconds` prints it
        return sum(
            parse(part, "count") * scale for part, scale in zip(parts.groups(), _LONGER.values(), strict=True) if part
        )
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text}' is not a quantity (write {_EXAMPLE[dimension]})")
    number, unit = match.groups()
    if "," in number and not _GROUPED.match(number):
        raise ValueError(f"'{text}': a comma groups three digits, and a point comes before fractions")
    return scaled(float(number.replace(",", "")), unit, dimension, text)


def whole_number(text: str, least: int = 1) -> int:
    """A whole number from `least`, 1 or 0, to `LARGEST`. Raises ValueError saying what it is not, or must be."""
    text = text.strip()
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError("is not a whole number")
    digits = text.lstrip("+-0")
    if (digits and text.startswith("-")) or (not digits and least > 0):
        raise ValueError(f"must be at least {least}")
    if len(digits) > len(str(LARGEST)) or int(digits or "0") > LARGEST:  # int() takes no thousands of digits
        raise ValueError(f"must be at most {LARGEST:,}")
    return int(digits or "0")


def scaled(number: float, unit: str, dimension: Dimension, text: str = "") -> float:
    """`number` of `unit` in the SI unit of `dimension`, or ValueError as of `parse`; `text` is what the user wrote."""
    text = text or f"{number} {unit}".strip()
    try:
        number = float(number)
    except OverflowError:  # a whole number of more than 308 digits
        number = math.inf if number > 0 else -math.inf
    if math.isnan(number):
        raise ValueError(f"'{text}' is not a number")
    if number < 0:
        raise ValueError(f"'{text}' is negative")
    scale = _UNITS[dimension].get(unit)
    if scale is None:
        said = f"has the unit '{unit}'" if unit else "has no unit"
        raise ValueError(f"'{text}' {said} (write {_EXAMPLE[dimension]})")
    value = number * scale if scale >= 1 else number / (1 / scale)  # 5.77 us is 5.77e-06, not 5.769999999999999e-06
    if math.isinf(value):
        raise ValueError(f"'{text}' is infinite")
    return value


def format_bytes(n: float) -> str:
    """Memory, in binary units: `12.3 GiB`. Only whole bytes below 1 KiB."""
    return _scaled_text(n, ((PIB, "PiB"), (TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")), "B")


def format_decimal_bytes(n: float) -> str:
    """A message's or a lesson's bytes, in decimal units: `4.29 GB`."""
    return _scaled_text(n, ((PB, "PB"), (TB, "TB"), (GB, "GB"), (MB, "MB"), (KB, "kB")), "B")


def format_rate(bytes_per_second: float) -> str:
    """A link's speed: `450 GB/s`."""
    return f"{format_decimal_bytes(bytes_per_second)}/s"


def format_flops_per_second(n: float) -> str:
    """A chip's speed: `989 TFLOPS`."""
    return _scaled_text(n, ((1e18, "EFLOPS"), (PFLOPS, "PFLOPS"), (TFLOPS, "TFLOPS"), (GFLOPS, "GFLOPS")), "FLOPS")


def format_seconds(seconds: float) -> str:
    """`3.13 µs`, `12.4 ms`, `5.21 s`, `2 min 05 s`, `3 h 20 min`, `12 d 04 h`."""
    if not math.isfinite(seconds):
        return _not_finite(seconds)
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if seconds < 59.995:  # what three digits would print as 60.0 s is a minute
        if seconds == 0:
            return "0 s"
        return _scaled_text(seconds, ((1.0, "s"), (MILLISECOND, "ms"), (MICROSECOND, "µs"), (1e-9, "ns")), "s")
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, rest = divmod(round(seconds / 60), 60)
    if hours < 24:
        return f"{hours} h {rest:02d} min"
    days, rest = divmod(round(seconds / 3600), 24)
    return f"{days:,} d {rest:02d} h"


def format_seconds_between(low: float, high: float) -> str:
    """`58.9–74.1 s`, `712–893 ms`, `10.2–13.0 min`: both in the unit that suits `high`, in three digits."""
    if not (math.isfinite(high) and 0 < low <= high):
        return f"{format_seconds(low)}–{format_seconds(high)}"
    scales = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (MILLISECOND, "ms"), (MICROSECOND, "µs"))
    # Of what is longer than a second there are at least ten, so that no digit is lost to a larger unit.
    scale, unit = next(((s, u) for s, u in scales if high >= (10 * s if s > 1 else s)), (1e-9, "ns"))
    return f"{_three_digits(low / scale)}–{_three_digits(high / scale)} {unit}"


def format_short_count(n: float) -> str:
    """A count, in three digits: `70.6 B`."""
    return _scaled_text(n, ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")), "")


def _scaled_text(n: float, scales: tuple[tuple[float, str], ...], unit: str) -> str:
    """`n` in three significant digits of the largest unit that it fills once; whole below all of them."""
    if not math.isfinite(n):
        return _not_finite(n)
    for i, (scale, name) in enumerate(scales):
        if abs(n) >= scale or (i == len(scales) - 1 and 0 < scale < 1):
            digits = _three_digits(n / scale)
            # 999.9 MB prints as 1,000 MB, which is 1 GB; binary units print up to 1,023
            if i and abs(float(digits.replace(",", ""))) * scale >= scales[i - 1][0]:
                digits, name = _three_digits(n / scales[i - 1][0]), scales[i - 1][1]
            return f"{digits} {name}"
    return f"{n:,.0f} {unit}".rstrip()


def _three_digits(x: float) -> str:
    decimals = max(0, 2 - math.floor(math.log10(abs(x)))) if x else 0
    return f"{x:,.{min(decimals, 2)}f}"


def _not_finite(n: float) -> str:
    return "unknown" if math.isnan(n) else "infinite" if n > 0 else "-infinite"
