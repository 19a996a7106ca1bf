"""Models by name: the shipped presets, with their published parameter counts, and users' `config.json` files."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nanum import files
from nanum.errors import LONGEST_NAME, Refused, cut_short, printable
from nanum.model import Model
from nanum.model.config import from_config, trusted
from nanum.units import MIB

_FOLDER = Path(__file__).resolve().parents[1] / "data" / "models"
_LARGEST_FILE_BYTES = 16 * MIB  # a config.json has kilobytes: a weights file, given by mistake, is not read


@dataclass(frozen=True)
class Preset:
    """A shipped model. `parameters` is the published count, exact to the unit where `verified` says so;
    `active_parameters` is what of it a token meets, where that is less (with both tables of the vocabulary).
    """

    name: str
    aliases: tuple[str, ...]
    family: str
    config: dict[str, Any]
    parameters: int
    verified: Literal["exact", "approx"]
    source: str
    notes: str = ""
    active_parameters: int | None = None

    def model(self) -> Model:
        return trusted(self.config, self.name, self.source)


def presets() -> list[Preset]:
    """Every shipped model, family by family."""
    rows = [row for path in sorted(_FOLDER.glob("*.json")) for row in json.loads(path.read_text(encoding="utf-8"))]
    return [Preset(**{**row, "aliases": tuple(row["aliases"])}) for row in rows]


def load(word: str) -> Model:
    """The model that `word` names: a preset or its alias (in any case), a `config.json`, or a folder with one.

    Raises `Refused` with every reason: no such preset (with the nearest names), no such file, not JSON, or a config
    that `from_config` refuses.
    """
    by_name = {name.lower(): preset for preset in presets() for name in (preset.name, *preset.aliases)}
    if preset := by_name.get(word.lower()):
        return preset.model()
    path = Path(word)
    if word and (_exists(path) or path.suffix == ".json"):
        return _read(path)
    import difflib

    close = difflib.get_close_matches(word.lower(), by_name, n=3)
    names = list(dict.fromkeys(by_name[name].name for name in close))
    hint = f"close: {', '.join(names)}; " if names else ""
    raise Refused(
        f"unknown model '{cut_short(word)}': neither a preset nor a file ({hint}`nanum models` lists the presets)"
    )


def _read(path: Path) -> Model:
    file = path / "config.json" if path.is_dir() else path
    raw = files.read(file, "a config.json", _LARGEST_FILE_BYTES)
    twice: list[str] = []

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return dict(pairs)

    try:
        config = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=table)  # some editors begin a file with a mark
    except RecursionError:
        raise Refused(f"{file}: not JSON (nested too deeply)") from None
    except UnicodeDecodeError:
        raise Refused(f"{file}: not JSON (not text)") from None
    except json.JSONDecodeError as error:
        raise Refused(f"{file}: not JSON (line {error.lineno}, column {error.colno}: {error.msg})") from None
    except ValueError:  # int() takes no thousands of digits
        raise Refused(f"{file}: not JSON (a number is too long)") from None
    if not isinstance(config, dict):
        raise Refused(f"{file}: not the JSON object that a config.json holds")
    if twice:
        raise Refused(f"{file}: the key '{cut_short(key)}' stands there more than once" for key in dict.fromkeys(twice))
    folder = file.resolve().parent.name
    name = folder if file.name == "config.json" and folder else file.stem
    return from_config(config, cut_short(printable(name), LONGEST_NAME), where=str(file))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a word too long for a file's name, or with a NUL in it
        return False
