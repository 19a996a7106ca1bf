"""The lesson nanum grew from: a computation is divided, and what is left is communication.

Part A is arithmetic and predictions; B and C measure one process of this machine; D and E run data, tensor and pipeline
parallelism on several; and the last part answers five beliefs from the parts before it. What is measured is run in
processes of its own. Each part is a document first; what is printed is made of that document alone.
"""

from __future__ import annotations

import json as json_text
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress

from nanum.errors import Refused, RunFailed
from nanum.lesson.communication import part_a
from nanum.lesson.data_parallel import part_d
from nanum.lesson.memory import part_c
from nanum.lesson.misconceptions import part_m
from nanum.lesson.page import Page
from nanum.lesson.printed_communication import print_a
from nanum.lesson.printed_data_parallel import print_d
from nanum.lesson.printed_memory import print_c
from nanum.lesson.printed_misconceptions import print_m
from nanum.lesson.printed_scaling import print_b
from nanum.lesson.printed_three_ways import print_e
from nanum.lesson.scaling import part_b
from nanum.lesson.three_ways import part_e
from nanum.lesson.words import Language, Words
from nanum.processes import Progress as Advance
from nanum.processes import torch_is_missing

__all__ = ["PARTS", "Language", "document", "run"]

PARTS = ("A", "B", "C", "D", "E")
BELIEFS = "misconceptions"

MEASUREMENTS: dict[str, Callable[[Advance], dict[str, Any]]] = {
    "B": part_b,
    "C": part_c,
    "D": part_d,
    "E": part_e,
}
PRINTERS: dict[str, Callable[[dict[str, Any], Page], None]] = {
    "A": print_a,
    "B": print_b,
    "C": print_c,
    "D": print_d,
    "E": print_e,
    BELIEFS: print_m,
}


def document(parts: Sequence[str] = (), *, lang: str = "en") -> dict[str, Any]:
    """The lesson's document: a key for each part, all by default, and `misconceptions` where all are asked.

    Raises:
        Refused: no such language or part, or one that measures where there is no torch.
        RunFailed: a process of D or E died, hung or ran out of memory.
    """
    chosen, say = _asked(parts, lang)
    if missing := _unmeasurable(chosen, say):
        raise Refused(missing)
    made: dict[str, Any] = {}
    for part in _sections(chosen):
        made[part] = _made(part, made, say)
    return made


def run(parts: Sequence[str] = (), lang: str = "en", json: bool = False, console: Console | None = None) -> int:
    """Print the lesson, part by part as each is done, or its document with `json`. No part named is all of them.

    Returns 0, or 1 where E finds that a run exchanged or held something else than was predicted.

    Raises:
        Refused, RunFailed: as `document` does. Where torch is all that is missing, the parts that do without it are
            given first; where a run fails, those before it are.
    """
    console = console or Console(highlight=False)
    chosen, say = _asked(parts, lang)
    missing = _unmeasurable(chosen, say)
    made: dict[str, Any] = {}
    failed: RunFailed | None = None
    try:
        for part in _sections([part for part in chosen if not (missing and part in MEASUREMENTS)]):
            made[part] = _made(part, made, say)
            if not json:
                PRINTERS[part](made[part], Page(say, console))
    except Refused as refused:
        missing.extend(refused.reasons)
    except RunFailed as failure:
        failed = failure
    if json and made:
        console.file.write(json_text.dumps(made, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    if missing:
        raise Refused(missing)
    if failed is not None:
        raise failed
    return 0 if made.get("E", {}).get("ok", True) else 1


def _asked(parts: Sequence[str], lang: str) -> tuple[list[str], Words]:
    """The parts asked, in order and once each, and the words for them. Raises Refused with every reason.

    The reasons are in the language asked, or in English where it is not one of the lesson's.
    """
    reasons: list[str] = []
    try:
        say = Words(lang)
    except Refused as refused:
        reasons.extend(refused.reasons)
        say = Words("en")
    asked = [part.upper() for part in parts] or list(PARTS)
    named = ", ".join(PARTS)
    reasons += [say("unknown", part=part, parts=named) for part in dict.fromkeys(asked) if part not in PARTS]
    chosen = [part for part in PARTS if part in asked]
    if reasons:
        raise Refused([*reasons, *_unmeasurable(chosen, say)])
    return chosen, say


def _unmeasurable(chosen: Sequence[str], say: Words) -> list[str]:
    measuring = [part for part in chosen if part in MEASUREMENTS]
    return [say("no_torch", part=part) for part in measuring] if measuring and torch_is_missing() else []


def _sections(chosen: Sequence[str]) -> list[str]:
    """The parts to make, and the beliefs after them where they have all their answers."""
    return [*chosen, *([BELIEFS] if set(PARTS) <= set(chosen) else [])]


def _made(part: str, made: dict[str, Any], say: Words) -> dict[str, Any]:
    if part == "A":
        return part_a()
    if part == BELIEFS:
        return part_m(made)
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task(say(f"{part}.progress"), total=None)

        def advance(done: int, total: int, what: str = "", /) -> None:
            bar.update(task, completed=done, total=total)

        return MEASUREMENTS[part](advance)
