"""What the user's words say of the host's memory."""

from __future__ import annotations

from typing import Any, get_args

from nanum.cli.reader import Reader, shown
from nanum.layout import Offload


def offloaded(reader: Reader) -> dict[str, Any]:
    """What is kept in the host's memory, by names with a plus or a comma between, in one order whatever is said."""
    word = reader.word("offload") or "none"
    said = [name.strip() for name in word.replace("+", ",").split(",")]
    names = set(said)
    known, part = get_args(Offload), _fraction(reader)
    if said == ["none"]:
        return {"offload_fraction": part}
    if twice := [name for name in known if said.count(name) > 1]:
        reader.reasons.append(f"--offload {shown(word)}: names {' and '.join(twice)} more than once")
        return {}
    if not names <= set(known):
        reader.reasons.append(f"--offload {shown(word)}: must be none, or of {', '.join(known)}, with a plus between")
        return {}
    return {"offload": tuple(name for name in known if name in names), "offload_fraction": part}


def _fraction(reader: Reader) -> float:
    word = reader.word("offload_fraction")
    if word is None:
        return 1.0
    try:
        part = float(word)
    except ValueError:
        part = 0.0
    if not 0 < part <= 1:
        reader.reasons.append(f"--offload-fraction {shown(word)}: must be a number above 0 and at most 1")
        return 1.0
    return part
