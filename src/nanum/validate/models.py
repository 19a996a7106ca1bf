"""The model of a published run, from the dimensions that its row states."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

from nanum.model import Attention, Experts, LatentAttention, Layer, Mlp, Model
from nanum.model.presets import Preset, presets
from nanum.validate.rows import Row
from nanum.validate.sources import Family, Source

LATENT = re.compile(r"MLA q_lora(N) kv_lora(N) nope(N) rope(N) v(N)".replace("N", r"[1-9]\d{0,8}"))
EVERY_OTHER = re.compile(r"([1-9]\d{0,8}), every other layer")


def model_of(row: Row, source: Source, reasons: list[str]) -> Model | None:
    """None, and why, where the row does not say enough."""
    vocab = row["model.vocab"] or source.vocab
    sizes = {n: row[f"model.{n}"] for n in ("layers", "hidden", "heads", "seq")} | {"vocab": vocab}
    width = row["model.ffn"] or row["model.moe.moe_ffn"]
    missing = [name for name, size in {**sizes, "ffn": width}.items() if size is None]
    if row["family"] == "hybrid":
        reasons.append("state-space layers are not modelled")
    if missing:
        reasons.append(f"the model's size is not stated ({', '.join(missing)})")
        return None
    assert vocab is not None
    if source.public_models and (public := _public(row, vocab)):
        return public
    if wrong := list(_wrong_sizes(row)):
        reasons.extend(wrong)
        return None
    gated = source.family == "llama"
    attention = _attention(row, source.family, reasons)
    dense = Mlp(width, gated, "silu" if gated else "gelu", bias=not gated)
    if attention is None:
        return None
    mlp = _experts(row, gated) if row["model.moe"] else dense
    leading = (Layer(attention, dense),) * (row["model.moe.dense_layers"] or 0)
    return Model(
        name=row["model.name"] or row.id,
        hidden_size=sizes["hidden"],
        vocab_size=sizes["vocab"],
        num_hidden_layers=sizes["layers"],
        max_position_embeddings=sizes["seq"],
        attention=attention,
        mlp=mlp,
        norm="rms_norm" if gated else "layer_norm",
        position={"llama": "rotary", "bloom": "alibi"}.get(source.family, "learned"),  # type: ignore[arg-type]
        tie_word_embeddings="tied" in (row["model.name"] or "") if gated else True,
        hidden_dropout=_dropout(source.family),
        leading=leading,
        alternates=_windowed(row, attention, mlp),
        embedding_norm=source.family == "bloom",
    )


def _wrong_sizes(row: Row) -> Iterator[str]:
    """Why there is no such model."""
    heads, keys = row["model.heads"], row["model.kv_heads"]
    if keys and heads % keys:
        yield f"kv_heads={keys} does not divide heads={heads}"
    experts, topk = row["model.moe.experts"], row["model.moe.topk"]
    if row["model.moe"] and not experts:
        yield "the number of experts is not stated"
    elif experts and (topk or 1) > experts:
        yield f"topk={topk} exceeds experts={experts}"
    if (dense := row["model.moe.dense_layers"] or 0) > row["model.layers"]:
        yield f"dense_layers={dense} exceeds layers={row['model.layers']}"


@cache
def _by_name() -> Mapping[str, Preset]:
    return {preset.name.lower(): preset for preset in presets()}


def _public(row: Row, vocab: int) -> Model | None:
    """The shipped model of that name, which has what a row leaves out: biases, sinks of attention, norms of heads,
    groups of experts. None where there is none, or where the row states other sizes.
    """
    preset = _by_name().get((row["model.name"] or "").lower())
    if preset is None:
        return None
    model = preset.model()
    a, mlp = model.attention, model.mlp
    sizes = {"layers": model.num_hidden_layers, "hidden": model.hidden_size, "heads": a.num_attention_heads}
    if isinstance(mlp, Experts):
        sizes |= {"moe.experts": mlp.num_experts, "moe.topk": mlp.num_experts_per_tok}
        sizes |= {"moe.moe_ffn": mlp.expert.intermediate_size}
    else:
        sizes |= {"ffn": mlp.intermediate_size}
    if isinstance(a, Attention):
        sizes |= {"kv_heads": a.num_key_value_heads}
    if any(row[f"model.{name}"] not in (None, size) for name, size in sizes.items()):
        return None
    return replace(model, name=row["model.name"], vocab_size=vocab, max_position_embeddings=row["model.seq"])


def _dropout(family: Family) -> float:
    return 0.1 if family == "gpt" else 0.0


def _attention(row: Row, family: Family, reasons: list[str]) -> Attention | LatentAttention | None:
    heads, said = row["model.heads"], row["model.moe.attention"]
    if said is not None:
        found = LATENT.fullmatch(said)
        if found is None:
            reasons.append("the sizes of its latent attention are not stated")
            return None
        q_rank, kv_rank, nope, rope, value = map(int, found.groups())
        return LatentAttention(heads, q_rank, kv_rank, nope, rope, value)
    head_dim = row["model.moe.head_dim"]
    if head_dim is None and row["model.hidden"] % heads:
        reasons.append(f"hidden={row['model.hidden']} is no multiple of heads={heads}")
        return None
    biased = family != "llama"
    return Attention(
        heads,
        row["model.kv_heads"] or heads,
        head_dim or row["model.hidden"] // heads,
        qkv_bias=biased,
        output_bias=biased,
        dropout=_dropout(family),
    )


def _experts(row: Row, gated: bool) -> Experts:
    width = row["model.moe.moe_ffn"] or row["model.ffn"]
    shared = row["model.moe.shared_ffn"] or width * (row["model.moe.shared_experts"] or 0)
    activation = "silu" if gated else "gelu"
    return Experts(
        row["model.moe.experts"] or 1,
        row["model.moe.topk"] or 1,
        Mlp(width, gated, activation),  # type: ignore[arg-type]
        Mlp(shared, gated, activation) if shared else None,  # type: ignore[arg-type]
    )


def _windowed(row: Row, attention: Attention | LatentAttention, mlp: Mlp | Experts) -> tuple[Layer, ...]:
    """The layers before each ordinary one."""
    found = EVERY_OTHER.match(row["model.moe.sliding_window"] or "")
    if found is None or isinstance(attention, LatentAttention):
        return ()
    return (Layer(replace(attention, window=int(found[1])), mlp),)
