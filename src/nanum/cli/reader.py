"""Flags are read one by one. What cannot be read is a reason, not an end: all of them are raised together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar, get_args

from nanum.errors import Refused
from nanum.job import LoraTargets, Optimizer, Precision, Quantized, TrainedWeights
from nanum.layout import ContextParallel, DispatchDtype, Dispatcher, GradSync, Loss, Recompute, Schedule
from nanum.units import whole_number

Flags = Mapping[str, str | bool | None]
"""Flags by their Python names (`seq_len`), as text; None where the user said nothing."""
T = TypeVar("T")

# The words of each choice: those modelled, then those that exist but are not modelled yet.
CHOICES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "precision": (get_args(Precision), ()),
    "optimizer": (get_args(Optimizer), ()),
    "train": (get_args(TrainedWeights), ()),
    "lora_targets": (get_args(LoraTargets), ()),
    "quantize": (get_args(Quantized), ("int8",)),
    "zero": (("0", "1", "2", "3"), ()),
    "schedule": (get_args(Schedule), ()),
    "recompute": (get_args(Recompute), ()),
    "attention": (("flash", "eager"), ()),
    "loss": (get_args(Loss), ()),
    "grad_sync": (get_args(GradSync), ()),
    "dispatcher": (get_args(Dispatcher), ()),
    "dispatch_dtype": (get_args(DispatchDtype), ()),
    "cp_kind": (tuple(kind for kind in get_args(ContextParallel) if kind != "none"), ()),
}


@dataclass
class Reader:
    """Reads flags one by one; a flag that cannot be read leaves a reason and answers with its default."""

    flags: Flags
    reasons: list[str] = field(default_factory=list)
    unread: bool = False  # of a number or a choice: what would follow from it is not known
    none_left: bool = False  # the axes do not divide the GPUs, and dp_shard is not known
    defaults: list[str] = field(default_factory=list)

    def whole(self, name: str, default: int, *, least: int = 1) -> int:
        """A whole number, from 1 or from 0; not recorded as a default, since 1 is what an unsaid axis means."""
        word = self.word(name)
        if word is None:
            return default
        try:
            number = whole_number(word, least)
        except ValueError as error:
            self.reasons.append(f"{flag(name)} {shown(word)} {error}")
            self.unread = True
            return default
        return number

    def choice(self, name: str, default: str, or_else: str = "") -> str:
        """One of a flag's words; `or_else` says what it may be besides, which the caller reads."""
        word = self.word(name)
        if word is None:
            return default
        modelled, known = CHOICES[name]
        if word in modelled:
            return word
        self.unread = True
        if word in known:
            instead = f"choose {_either(modelled)}" if modelled else "leave it out"
            self.reasons.append(f"{flag(name)} {word} is not modelled yet: {instead}")
        else:
            self.reasons.append(f"{flag(name)} {shown(word)}: must be {_either(modelled + known)}{or_else}")
        return default

    def ratio(self, name: str, least: float, must: str) -> float | None:
        """A number from `least` to a million, which `must` says in words; None where the user said none."""
        if (word := self.word(name)) is None:
            return None
        try:
            number = float(word)
        except ValueError:
            number = 0.0
        if least <= number <= 1e6:
            return number
        self.reasons.append(f"{flag(name)} {shown(word)}: {must}, and at most a million")
        return None

    def switch(self, name: str, default: bool) -> bool:
        value = self.flags.get(name)
        return value if isinstance(value, bool) else default

    def said(self, name: str) -> bool:
        return self.flags.get(name) is not None

    def word(self, name: str) -> str | None:
        """What the user said, or None."""
        value = self.flags.get(name)
        return value.strip() if isinstance(value, str) else None


def loaded(load: Callable[[str], T], word: str, reader: Reader) -> T | None:
    try:
        return load(word)
    except Refused as refused:
        reader.reasons.extend(refused.reasons)
        return None


def flag(name: str, value: str | bool | None = None) -> str:
    """As the user says it: of a switch that is off, what turns it off."""
    return ("--no-" if value is False else "--") + name.replace("_", "-")


def shown(word: str) -> str:
    """A user's word as a reason repeats it: not long, and in quotes where it would not be seen."""
    return repr(word) if not word or word != word.strip() else word if len(word) <= 24 else f"{word[:20]}…"


def _either(words: tuple[str, ...]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
