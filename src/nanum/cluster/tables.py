"""What tables of chips and links say: numbers with their units, ranges and sources; and the tables that are shipped."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from nanum.cluster import Quantity, Tag
from nanum.errors import cut_short
from nanum.units import Dimension, parse, scaled

Table = Mapping[str, Any]

DATA = Path(__file__).resolve().parents[1] / "data" / "clusters"
MOST: dict[Dimension, float] = {
    "bytes": 2**50,
    "bytes_per_second": 1e18,
    "flops_per_second": 1e21,
    "seconds": 1e3,
    "count": 1e6,
}
"""Some thousand times beyond any chip or link made: a slip of the unit, and times that overflow."""
LEAST = 1.0  # B/s and FLOPS: below one, times overflow
LEAST_EFFICIENCY = 1e-6
MOST_EFFICIENCY = 2.0  # a bus bandwidth may pass the line rate where a switch reduces, but not by much
LINK_KEYS = ("bandwidth", "efficiency", "latency", "group_size")


def chip_names() -> list[str]:
    """The chips that are shipped."""
    return sorted(path.stem for path in (DATA / "chips").glob("*.toml"))


def unknown_chip(chip: str) -> str:
    """Why a chip that is not shipped is refused, with the names nearest to it."""
    import difflib

    known = chip_names()
    close = difflib.get_close_matches(chip.lower(), known, n=3)
    hint = f"close: {', '.join(close)}; " if close else ""
    return f"unknown chip '{cut_short(chip)}' ({hint}known: {', '.join(known)})"


def chip_table(chip: str | Table) -> Table:
    """A chip's own table, or the shipped one that is named."""
    return read_toml(DATA / "chips" / f"{chip.lower()}.toml") if isinstance(chip, str) else chip


def link_tables(table: Table) -> tuple[Table, Table]:
    """The links in a node and between nodes, as tables: the user's keys over the chip's and over the default's."""
    shipped = chip_table(table["chip"]) if isinstance(table["chip"], str) else {}
    of_chip = shipped.get("intra_node", {})
    between = {**read_toml(DATA / "inter_node.toml"), **shipped.get("inter_node", {})}
    intra_node = {**of_chip, **table.get("intra_node", {})}
    if not _same(of_chip, intra_node, "bandwidth", "bytes_per_second"):  # another link, which is filled its own way
        intra_node.pop("ramp", None)
    elif "ramp" in intra_node and not _same(of_chip, intra_node, "efficiency", "ratio"):
        # It may be that of an all-reduce, which the switch has made faster already.
        intra_node["ramp"] = {**intra_node["ramp"], "in_switch": False}
    return intra_node, {**between, **table.get("inter_node", {})}


def _same(a: Table, b: Table, key: str, dimension: Dimension) -> bool:
    """Do two links state one number? Where either states none, no."""
    return key in a and key in b and quantity(a[key], dimension, "").value == quantity(b[key], dimension, "").value


def ramp_table(name: str) -> Table:
    """How a link in a node is filled: a shipped table."""
    found: Table = read_toml(DATA / "ramps.toml")[name]
    return found


def host_table(table: Table) -> Table:
    """The host of a GPU: the user's keys over the chip's and over the default's."""
    return {**read_toml(DATA / "host.toml"), **chip_table(table["chip"]).get("host", {}), **table.get("host", {})}


def read_toml(path: Path) -> Table:
    import tomllib

    with path.open("rb") as file:
        return tomllib.load(file)


def said(given: Any) -> str:
    """A value as a TOML file says it, not longer than a line."""
    return cut_short(_as_toml(given))


def _as_toml(given: Any) -> str:
    if isinstance(given, bool):
        return str(given).lower()
    if isinstance(given, dt.date | dt.time):
        return given.isoformat()
    if isinstance(given, list):
        return f"[{', '.join(map(_as_toml, given))}]"
    if isinstance(given, dict):
        return f"{{ {', '.join(f'{key} = {_as_toml(value)}' for key, value in given.items())} }}" if given else "{}"
    return repr(given)


def quantity(
    raw: Any, dimension: Dimension, where: str, in_range: Callable[[float, Dimension, str], float] | None = None
) -> Quantity:
    """A number of a file, with where it is from. Raises ValueError saying what is wrong with it, be it by `in_range` of
    its own and not by that of its dimension.
    """
    in_range = in_range or _in_range
    if isinstance(raw, str):
        return Quantity(in_range(parse(raw, dimension), dimension, raw), "assumed", f"stated in {where}")
    if _is_number(raw):
        return Quantity(in_range(scaled(raw, "", dimension), dimension, str(raw)), "assumed", f"stated in {where}")
    if not isinstance(raw, dict):
        raise ValueError(f"{said(raw)} is not a quantity")
    wrong = [f"unknown key '{key}'" for key in raw if key not in ("value", "unit", "tag", "source")]
    if not _is_number(raw.get("value")):
        wrong.append(f"value = {said(raw['value'])} is not a number" if "value" in raw else "value is missing")
    if raw.get("tag") not in get_args(Tag):
        wrong.append(
            f"tag = {said(raw.get('tag'))} is not one of {', '.join(get_args(Tag))}" if "tag" in raw else "no tag"
        )
    if not isinstance(raw.get("source"), str) or not raw["source"].strip():
        wrong.append("no source")
    if not isinstance(raw.get("unit", ""), str):
        wrong.append(f"unit = {said(raw['unit'])} is not text")
    if wrong:
        raise ValueError("; ".join(wrong))
    number, unit = raw["value"], raw.get("unit", "")
    value = in_range(scaled(number, unit, dimension), dimension, f"{number} {unit}".strip())
    return Quantity(value, raw["tag"], raw["source"])


def _is_number(raw: Any) -> bool:
    return isinstance(raw, int | float) and not isinstance(raw, bool)


def _in_range(value: float, dimension: Dimension, said: str) -> float:
    if value == 0 and dimension != "seconds":
        raise ValueError(f"'{said}' is zero")
    if dimension == "ratio" and value > MOST_EFFICIENCY:
        raise ValueError(f"'{said}' is more than {MOST_EFFICIENCY:g} (a share of the line rate, or write a %)")
    if value > MOST.get(dimension, value):
        raise ValueError(f"'{said}' is beyond any chip or link")
    if value < {"ratio": LEAST_EFFICIENCY, "seconds": 0.0}.get(dimension, LEAST):
        raise ValueError(f"'{said}' is nearly nothing")
    if dimension in ("count", "bytes"):
        if value != round(value):
            raise ValueError(f"'{said}' is not a whole number")
        return round(value)
    return value
