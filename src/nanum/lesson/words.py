"""The lesson's two languages, and its numbers as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from nanum.errors import Refused
from nanum.lesson.text_en import TEXT as ENGLISH
from nanum.lesson.text_en_runs import TEXT as ENGLISH_RUNS
from nanum.lesson.text_ko import TEXT as KOREAN
from nanum.lesson.text_ko_runs import TEXT as KOREAN_RUNS
from nanum.units import GB, MB, format_seconds

Language = Literal["en", "ko"]
TEXTS: dict[str, dict[str, str]] = {"en": ENGLISH | ENGLISH_RUNS, "ko": KOREAN | KOREAN_RUNS}


@dataclass(frozen=True)
class Words:
    """The texts of one language, by key: `say("A.title")`."""

    lang: str

    def __post_init__(self) -> None:
        if self.lang not in TEXTS:
            raise Refused([f"lang={self.lang} is not a language of the lesson: {', '.join(get_args(Language))}"])

    def __call__(self, key: str, **fields: object) -> str:
        return TEXTS[self.lang][key].format(**fields)


def processor(device: dict[str, Any], say: Words) -> str:
    """What was measured on: `CPU (AMD EPYC, 1 thread)`, `CUDA (NVIDIA H100 80GB HBM3)`."""
    threads = device["threads"]
    key = "processor" if not threads else "processor.one_thread" if threads == 1 else "processor.threads"
    return say(key, kind=device["kind"].upper(), name=device["name"], threads=threads)


def gigabytes(count_bytes: float) -> str:
    """As the lesson prints them: 28.0, 4.29, 0.067."""
    value = count_bytes / GB
    return f"{value:,.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}" if value else "0"


def tenths_of_gigabytes(count_bytes: float) -> str:
    """As the lesson prints memory: 112.0, 57.8, 3.5."""
    return f"{count_bytes / GB:,.1f}"


def megabytes(count_bytes: float) -> str:
    return f"{count_bytes / MB:,.1f}"


def times(ratio: float) -> str:
    """27.5, 1.38, 0.88."""
    return f"{ratio:,.1f}" if ratio >= 100 else f"{ratio:.2f}"


def seconds_between(low: float, high: float) -> str:
    """`301 – 352 ms`, `0.98 s – 1.04 s`; one of the two where they print alike."""
    first, second = format_seconds(low), format_seconds(high)
    if first == second:
        return first
    number, _, unit = first.partition(" ")
    return f"{number} – {second}" if second.partition(" ")[2] == unit else f"{first} – {second}"


def percent(fraction: float | None, decimals: int = 0) -> str:
    return "?" if fraction is None else f"{100 * fraction:.{decimals}f}%"
