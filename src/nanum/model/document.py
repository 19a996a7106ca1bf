"""A model out of the plain values that `dataclasses.asdict` made of it: how one process tells another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanum.model import Attention, Experts, LatentAttention, Layer, LinearAttention, Mlp, Model


def from_document(table: Mapping[str, Any]) -> Model:
    """The model again."""
    others = {name: tuple(map(_layer, table.get(name, ()))) for name in ("leading", "alternates")}
    return Model(**{**table, **vars(_layer(table)), **others})


def _layer(table: Mapping[str, Any]) -> Layer:
    attention, mlp = table["attention"], table["mlp"]
    return Layer(_attention(attention), _experts(mlp) or Mlp(**mlp))


def _attention(table: Mapping[str, Any]) -> Attention | LatentAttention | LinearAttention:
    if "rule" in table:
        return LinearAttention(**table)
    return LatentAttention(**table) if "kv_lora_rank" in table else Attention(**table)


def _experts(table: Mapping[str, Any]) -> Experts | None:
    if "num_experts" not in table:
        return None
    shared = table.get("shared")
    return Experts(**{**table, "expert": Mlp(**table["expert"]), "shared": Mlp(**shared) if shared else None})
