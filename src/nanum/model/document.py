"""A model out of the plain values that `dataclasses.asdict` made of it: how one process tells another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanum.model import Attention, Experts, LatentAttention, Layer, LinearAttention, Mlp, Model, Patches


def from_document(table: Mapping[str, Any]) -> Model:
    """The model again."""
    others = {name: tuple(map(_layer, table.get(name, ()))) for name in ("leading", "alternates")}
    patches = Patches(**table["patches"]) if table.get("patches") else None
    return Model(**{**table, **vars(_layer(table)), **others, "patches": patches})


def _layer(table: Mapping[str, Any]) -> Layer:
    attention, mlp = table["attention"], table["mlp"]
    cross = Attention(**table["cross"]) if table.get("cross") else None
    return Layer(_attention(attention), _experts(mlp) or Mlp(**mlp), cross)


def _attention(table: Mapping[str, Any]) -> Attention | LatentAttention | LinearAttention:
    if "rule" in table:
        return LinearAttention(**table)
    return LatentAttention(**table) if "kv_lora_rank" in table else Attention(**table)


def _experts(table: Mapping[str, Any]) -> Experts | None:
    if "num_experts" not in table:
        return None
    shared = table.get("shared")
    return Experts(**{**table, "expert": Mlp(**table["expert"]), "shared": Mlp(**shared) if shared else None})
