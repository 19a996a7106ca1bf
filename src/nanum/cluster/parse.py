"""From a table of a TOML file to a `Cluster`: one mapping, for shipped hardware and users' files alike.

A cluster file, with everything that it may hold:

    name = "lab"                     # the file's own name where left out
    nodes = 4
    gpus_per_node = 8                # one NVLink domain
    chip = "h100-sxm"                # one that `nanum clusters` lists, or a [chip] table of one's own

    [inter_node]                     # what is left out here is the default link's, and listed as assumed
    name = "InfiniBand NDR"
    bandwidth = "400 Gb/s"           # of one GPU, one direction
    efficiency = { value = 0.9, tag = "measured", source = "nccl-tests all_gather, 8 GiB" }
    latency = { value = 5, unit = "us", tag = "measured", source = "the same, 8 B" }
    group_size = 32                  # ranks that the efficiency was measured at

    [intra_node]                     # the same keys; what is left out is the chip's own

    [chip]                           # in the place of a chip's name; then [intra_node] must be whole
    name = "mine"
    memory = "81559 MiB"             # what the driver reports
    memory_bandwidth = "3.35 TB/s"
    multiprocessors = 132
    peak = { bf16 = "989 TFLOPS", fp32 = "67 TFLOPS" }    # dense
    best = { bf16 = "794.5 TFLOPS" }                      # the best measured matmul; may be left out

A number is a text with its unit, which is then tagged assumed, "stated in" the file; or a table of `value`, `unit`,
`tag` (datasheet, measured, assumed, derived) and `source`. Unknown keys are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from nanum.cluster import Chip, Cluster, Link, Quantity, Tag
from nanum.errors import Refused, cut_short
from nanum.units import Dimension, parse, scaled

Table = Mapping[str, Any]

DATA = Path(__file__).resolve().parents[1] / "data" / "clusters"
MOST_GPUS = 10_000_000
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


def from_table(table: Table, name: str, *, where: str) -> Cluster:
    """`table`, as read from a user's TOML file, as a `Cluster` called `name` unless it says otherwise.

    Raises `Refused` with every reason, each led by `where`.
    """
    from nanum.cluster import schema  # brings in pydantic, which a preset need not wait for

    reasons = schema.reasons(table, where)
    if reasons:
        raise Refused(f"{where}: {reason}" for reason in reasons)
    return trusted(table, name, where=where)


def trusted(table: Table, name: str, *, where: str) -> Cluster:
    """As `from_table`, for a table that is known to be good."""
    chip = chip_table(table["chip"])
    intra_node, inter_node = link_tables(table)
    cluster = Cluster(
        name=table.get("name", name),
        nodes=table["nodes"],
        gpus_per_node=table["gpus_per_node"],
        chip=_chip(chip, where),
        intra_node=_link(intra_node, "intra_node", where),
        inter_node=_link(inter_node, "inter_node", where),
    )
    return Cluster(**{**vars(cluster), "assumptions": tuple(_assumptions(cluster))})


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
    of_chip = chip_table(table["chip"]).get("intra_node", {}) if isinstance(table["chip"], str) else {}
    between = read_toml(DATA / "inter_node.toml")
    return {**of_chip, **table.get("intra_node", {})}, {**between, **table.get("inter_node", {})}


def read_toml(path: Path) -> Table:
    import tomllib

    with path.open("rb") as file:
        return tomllib.load(file)


def quantity(raw: Any, dimension: Dimension, where: str) -> Quantity:
    """A number of a file, with where it is from. Raises ValueError saying what is wrong with it."""
    if isinstance(raw, str):
        return Quantity(_in_range(parse(raw, dimension), dimension, raw), "assumed", f"stated in {where}")
    if _is_number(raw):
        return Quantity(_in_range(scaled(raw, "", dimension), dimension, str(raw)), "assumed", f"stated in {where}")
    if not isinstance(raw, dict):
        raise ValueError(f"{raw!r} is not a quantity")
    wrong = [f"unknown key '{key}'" for key in raw if key not in ("value", "unit", "tag", "source")]
    if not _is_number(raw.get("value")):
        wrong.append(f"value = {raw['value']!r} is not a number" if "value" in raw else "value is missing")
    if raw.get("tag") not in get_args(Tag):
        wrong.append(f"tag = {raw.get('tag')!r} is not one of {', '.join(get_args(Tag))}" if "tag" in raw else "no tag")
    if not isinstance(raw.get("source"), str) or not raw["source"].strip():
        wrong.append("no source")
    if not isinstance(raw.get("unit", ""), str):
        wrong.append(f"unit = {raw['unit']!r} is not text")
    if wrong:
        raise ValueError("; ".join(wrong))
    number, unit = raw["value"], raw.get("unit", "")
    value = _in_range(scaled(number, unit, dimension), dimension, f"{number} {unit}".strip())
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


def _chip(table: Table, where: str) -> Chip:
    return Chip(
        name=table["name"],
        peak_flops_per_second=_by_dtype(table["peak"], where),
        best_flops_per_second=_by_dtype(table.get("best", {}), where),
        memory_bytes=quantity(table["memory"], "bytes", where),
        memory_bytes_per_second=quantity(table["memory_bandwidth"], "bytes_per_second", where),
        multiprocessors=quantity(table["multiprocessors"], "count", where),
    )


def _by_dtype(table: Table, where: str) -> dict[str, Quantity]:
    return {dtype: quantity(raw, "flops_per_second", where) for dtype, raw in table.items()}


def _link(table: Table, tier: str, where: str) -> Link:
    return Link(
        name=table.get("name", tier),
        bytes_per_second=quantity(table["bandwidth"], "bytes_per_second", where),
        efficiency=quantity(table["efficiency"], "ratio", where),
        latency_seconds=quantity(table["latency"], "seconds", where),
        group_size=table["group_size"],
    )


def _assumptions(cluster: Cluster) -> list[tuple[str, Quantity]]:
    """What is assumed about a cluster, as far as it is used: a link that joins nothing is not."""
    chip = cluster.chip
    stated = [(f"{chip.name}: peak {dtype}", value) for dtype, value in chip.peak_flops_per_second.items()]
    stated += [(f"{chip.name}: best {dtype} matmul", value) for dtype, value in chip.best_flops_per_second.items()]
    stated += [
        (f"{chip.name}: memory", chip.memory_bytes),
        (f"{chip.name}: memory bandwidth", chip.memory_bytes_per_second),
        (f"{chip.name}: multiprocessors", chip.multiprocessors),
    ]
    if cluster.gpus_per_node > 1:
        stated += _of_link(cluster.intra_node, "link in a node", cluster.gpus_per_node)
    if cluster.nodes > 1:
        stated += _of_link(cluster.inter_node, "link between nodes", cluster.gpus)
    return [(what, value) for what, value in stated if value.tag == "assumed"]


def _of_link(link: Link, tier: str, gpus: int) -> list[tuple[str, Quantity]]:
    """Its numbers; an efficiency is assumed to hold in a larger group than the one that it was measured at."""
    efficiency = link.efficiency
    if gpus > link.group_size and efficiency.tag != "assumed":
        efficiency = Quantity(efficiency.value, "assumed", f"as at {link.group_size} GPUs: {efficiency.source}")
    return [
        (f"{tier} ({link.name}): bandwidth of one GPU", link.bytes_per_second),
        (f"{tier} ({link.name}): efficiency at {gpus:,} GPUs", efficiency),
        (f"{tier} ({link.name}): latency of one hop", link.latency_seconds),
    ]
