"""Clusters by name: `NODESxGPUSxCHIP`, the shipped presets, and users' TOML files."""

from __future__ import annotations

from pathlib import Path

from nanum.cluster import Chip, Cluster
from nanum.cluster.parse import from_table, trusted
from nanum.cluster.tables import DATA, MOST_GPUS, chip_names, read_toml, unknown_chip
from nanum.errors import Refused, cut_short

_LARGEST_FILE_BYTES = 2**20  # a cluster file has a page or two
_LONGEST_NUMBER = len(str(MOST_GPUS)) + 12  # digits; more are certainly too many GPUs, and slow to read


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
            sizes.append(_size(text))
        except ValueError as error:
            reasons.append(f"'{word[:80]}': {what} {error}")
    if len(sizes) == 2 and sizes[0] * sizes[1] > MOST_GPUS:
        reasons.append(f"'{word[:80]}': {sizes[0] * sizes[1]:,} GPUs, but at most {MOST_GPUS:,}")
    if chip.lower() not in chip_names():
        reasons.append(f"'{word[:80]}': {unknown_chip(chip)}")
    if reasons:
        raise Refused(reasons)
    return _of_chip(chip.lower(), nodes=sizes[0], gpus_per_node=sizes[1])


def _size(text: str) -> int:
    """A whole number of at least 1. Raises ValueError saying what it is instead."""
    said = text if len(text) <= 24 else f"{text[:23]}…"
    digits = text.removeprefix("-").removeprefix("+")
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError(f"= '{said}' is not a whole number")
    if len(digits) > _LONGEST_NUMBER:
        raise ValueError(f"= '{said}' is more than {MOST_GPUS:,}")
    value = int(text)
    if value < 1:
        raise ValueError(f"= '{said}' is {'zero' if value == 0 else 'negative'}, and must be at least 1")
    return value


def _of_chip(chip: str, nodes: int, gpus_per_node: int) -> Cluster:
    table = {"chip": chip, "nodes": nodes, "gpus_per_node": gpus_per_node}
    return trusted(table, f"{nodes}x{gpus_per_node}x{chip}", where="its name")


def _preset(path: Path) -> Cluster:
    return trusted(read_toml(path), path.stem, where=path.name)


def _read(path: Path) -> Cluster:
    import tomllib

    raw = _bytes_of(path)
    try:
        table = tomllib.loads(raw.decode("utf-8-sig"))  # some editors begin a file with a mark
    except tomllib.TOMLDecodeError as error:
        raise Refused(f"{path}: not TOML ({error})") from None
    except (UnicodeDecodeError, RecursionError):
        raise Refused(f"{path}: not TOML") from None
    except ValueError:  # int() takes no thousands of digits
        raise Refused(f"{path}: not TOML (a number is too long)") from None
    return from_table(table, path.stem, where=str(path))


def _bytes_of(path: Path) -> bytes:
    """What the file holds: no more is read than is taken, since a device has no end. Raises `Refused`."""
    try:
        with path.open("rb") as opened:
            raw = opened.read(_LARGEST_FILE_BYTES + 1)
    except FileNotFoundError:
        raise Refused(f"{path}: no such file") from None
    except OSError as error:
        raise Refused(f"{path}: {error.strerror or error}") from None
    except ValueError:  # a NUL in the name
        raise Refused(f"{str(path)!r}: no such file") from None
    if len(raw) > _LARGEST_FILE_BYTES:
        raise Refused(f"{path}: too large for a cluster file (over {_LARGEST_FILE_BYTES:,} bytes)")
    return raw
