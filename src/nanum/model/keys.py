"""What the keys of a `config.json` may be, and mean by default: in these terms families state their models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from nanum.model import Model
from nanum.model.layer import ACTIVATIONS

Config = Mapping[str, Any]
Values = Mapping[str, Any]
"""The keys that a family reads, with what they mean where the config says nothing."""


@dataclass(frozen=True)
class Key:
    """What a value may be, in code and in words. A key that is left out, or null, has its default; `null` says that
    null is a value of its own.
    """

    accepts: Callable[[Any], bool]
    says: str
    default: Any = None
    required: bool = False
    null: bool = False

    def must(self) -> Key:
        return replace(self, required=True)

    def or_(self, default: Any) -> Key:
        return replace(self, default=default)

    def or_null(self, default: Any = None) -> Key:
        return replace(self, default=default, null=True)


def whole(at_most: int, at_least: int = 1) -> Key:
    def accepts(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and at_least <= value <= at_most

    return Key(accepts, f"a whole number from {at_least} to {at_most:,}")


def fraction(says: str, accepts: Callable[[Any], bool]) -> Key:
    return Key(lambda value: isinstance(value, Real) and not isinstance(value, bool) and accepts(value), says)


def only(*values: Any) -> Key:
    """A key of which no other value is modelled."""
    words = " or ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values)
    return Key(lambda value: value in values and type(value) in map(type, values), f"{words}, and no other is modelled")


def words(*known: str) -> Key:
    return Key(
        lambda value: isinstance(value, list) and all(isinstance(word, str) and word in known for word in value),
        f"a list of {' or '.join(known)}",
    )


def numbers(says: str, at_most: int) -> Key:
    number = whole(at_most, 0)
    return Key(lambda value: isinstance(value, list) and all(map(number.accepts, value)), says)


# Ranges some ten times beyond any model trained. Multiplied out, at 16 bytes a parameter, they still fit 64 bits.
HIDDEN = whole(2**18)
INTERMEDIATE = whole(2**20)
LAYERS = whole(2**14)
HEADS = whole(2**12)
HEAD_DIM = whole(2**10)
VOCABULARY = whole(2**24)
POSITIONS = whole(2**30)
RANK = whole(2**16)
EXPERTS = whole(2**14)
SOME_LAYERS = whole(2**14, 0)
PROBABILITY = fraction("a number from 0 up to, but not, 1", lambda value: 0 <= value < 1)
CAP = fraction("a number above 0", lambda value: 0 < value < float("inf"))
SHARE = fraction("a number above 0, up to 1", lambda value: 0 < value <= 1)
FLAG = Key(lambda value: isinstance(value, bool), "true or false", default=False)
ACTIVATION = Key(lambda value: isinstance(value, str) and value in ACTIVATIONS, f"one of {', '.join(ACTIVATIONS)}")
TEXT = Key(lambda value: isinstance(value, str), "a word")
TABLE = Key(lambda value: isinstance(value, dict), "an object")
INDICES = numbers("a list of layers by their index", 2**14)
FLAGS = numbers("a list of 0 or 1, one for each layer", 1)


def _fits(values: Values) -> Iterator[str]:
    yield from ()


@dataclass(frozen=True)
class Family:
    """How models of one `model_type` are stated. `unfit` says what is wrong between values that are each right;
    `synonyms` are other names of keys; `left_out` names keys of what the model does not have here, and says so;
    `ignored` are keys of other families that this one's files have, and its class does not read.
    """

    keys: Mapping[str, Key]
    model: Callable[[Values, str, str], Model]
    unfit: Callable[[Values], Iterator[str]] = _fits
    synonyms: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def named(self, config: Config) -> dict[str, Any]:
        """The config under the family's own names of keys. Newer files have the rotary part of a head in a table of all
        that is rotary.
        """
        rotary = config.get("rope_parameters")
        share = rotary.get("partial_rotary_factor") if isinstance(rotary, Mapping) else None
        within = {} if share is None else {"partial_rotary_factor": share}
        return {self.synonyms.get(key, key): value for key, value in {**within, **config}.items()}

    def values(self, config: Config) -> dict[str, Any]:
        """What a config that is known to be good says by each key."""
        given = self.named(config)

        def value(name: str, key: Key) -> Any:
            found = given.get(name)
            return key.default if found is None and not (key.null and name in given) else found

        return {name: value(name, key) for name, key in self.keys.items()}
