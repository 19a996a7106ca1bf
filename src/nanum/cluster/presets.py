"""Clusters by name: `NODESxGPUSxCHIP`, the shipped presets, and users' TOML files."""

from __future__ import annotations

from pathlib import Path

from nanum import files
from nanum.cluster import Chip, Cluster
from nanum.cluster.parse import from_table, trusted
from nanum.cluster.tables import DATA, chip_names, read_toml, unknown_chip
from nanum.errors import Refused, cut_short
from nanum.units import LARGEST, MIB, whole_number

_LARGEST_FILE_BYTES = 4 * MIB  # a cluster file has a page or two, and one with grids some hundred kilobytes


def presets() -> list[Cluster]:
    """Every named cluster that is shipped."""
    return [_preset(path) for path in sorted((DATA / "presets").glob("*.toml"))]


def chips() -> list[Chip]:
    """Every chip that is shipped."""
    return [_of_chip(name, nodes=1, gpus_per_node=1).chip for name in chip_names()]


def load(word: str) -> Cluster:
    """The cluster that `word` names: `NODESxGPUSxCHIP` (`8x8xh100-sxm`, in any case), a preset, or a TOML file.

    The TOML format is described in `nanum.cluster.parse`. Raises `Refused` with every reason.
    """
    if word.endswith(".toml") or "/" in word:
        return _read(Path(word))
    named = {path.stem: path for path in (DATA / "presets").glob("*.toml")}
    if path := named.get(word.lower()):
        return _preset(path)
    parts = word.replace("X", "x").split("x", 2)
    one_number = word.lower().partition("x")
    if one_number[0].isdigit() and one_number[2] in chip_names():
        gpus, chip = one_number[0], one_number[2]
        raise Refused(f"'{cut_short(word)}' has one number before its chip: 1x{gpus}x{chip} is one node of {gpus} GPUs")
    if len(parts) == 3:
        return _sized(word, *parts)
    import difflib

    close = difflib.get_close_matches(word.lower(), named, n=3)
    hint = f"close: {', '.join(close)}; " if close else ""
    raise Refused(
        f"unknown cluster '{cut_short(word)}': neither NODESxGPUSxCHIP (such as 8x8xh100-sxm), a preset, nor a "
        f"TOML file ({hint}`nanum clusters` lists presets and chips)"
    )


def _sized(word: str, nodes: str, gpus_per_node: str, chip: str) -> Cluster:
    reasons = []
    sizes = []
    for what, text in (("NODES", nodes), ("GPUS", gpus_per_node)):
        try:
            sizes.append(whole_number(text))
        except ValueError as error:
            reasons.append(f"'{cut_short(word)}': {what} = '{cut_short(text, 24)}' {error}")
    if len(sizes) == 2 and sizes[0] * sizes[1] > LARGEST:
        reasons.append(f"'{cut_short(word)}': {sizes[0] * sizes[1]:,} GPUs, but at most {LARGEST:,}")
    if chip.lower() not in chip_names():
        reasons.append(f"'{cut_short(word)}': {unknown_chip(chip)}")
    if reasons:
        raise Refused(reasons)
    return _of_chip(chip.lower(), nodes=sizes[0], gpus_per_node=sizes[1])


def _of_chip(chip: str, nodes: int, gpus_per_node: int) -> Cluster:
    table = {"chip": chip, "nodes": nodes, "gpus_per_node": gpus_per_node}
    return trusted(table, f"{nodes}x{gpus_per_node}x{chip}", where="its name")


def _preset(path: Path) -> Cluster:
    return trusted(read_toml(path), path.stem, where=path.name)


def _read(path: Path) -> Cluster:
    import tomllib

    raw = files.read(path, "a cluster file", _LARGEST_FILE_BYTES)
    try:
        table = tomllib.loads(raw.decode("utf-8-sig"))  # some editors begin a file with a mark
    except tomllib.TOMLDecodeError as error:
        raise Refused(f"{path}: not TOML ({error})") from None
    except (UnicodeDecodeError, RecursionError):
        raise Refused(f"{path}: not TOML") from None
    except ValueError:  # int() takes no thousands of digits
        raise Refused(f"{path}: not TOML (a number is too long)") from None
    return from_table(table, path.stem, where=str(path))
