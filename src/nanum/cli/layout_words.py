"""What flags say of a layout. What they leave out is the engine's default, and is told."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from nanum.cli import expert_words
from nanum.cli.offloading import offloaded
from nanum.cli.reader import Reader, shown
from nanum.layout import AXES, ONE_STAGE, RECOMPUTE_MODULES, Layout, Structure

if TYPE_CHECKING:
    from nanum.engines.engine import Engine


def layout_of(
    reader: Reader,
    engine: Engine | None,
    gpus: int | None,
    *,
    micro_batch_size: int = 1,
    of: str = "GPUs of the cluster",
) -> Layout:
    """The layout that the flags name on so many GPUs, by an engine's defaults. Reasons are left with the reader: one
    says where the axes leave no GPUs for `--dp-shard`.
    """
    sizes = {axis: reader.whole(axis, 1) for axis in ("dp_replicate", "cp", "tp", "pp")}
    takes = _takes_the_rest(reader, engine)
    left = _gpus_left(reader, sizes, gpus, takes)
    if takes == "dp_replicate":
        sizes |= {"dp_replicate": left or 1}
    experts = expert_words.sizes(reader, sizes["tp"], engine)
    layout = Layout(
        **sizes,
        dp_shard=reader.whole("dp_shard", 1 if takes == "dp_replicate" else left or 1),
        micro_batch_size=reader.whole("micro_batch_size", micro_batch_size),
        structure=_structure(reader, {**sizes, **experts}, engine),
        rank_order=_rank_order(reader),
        **experts,
    )
    if left is None and gpus is not None:
        reader.none_left = True
        reader.reasons.append(_none_left(sizes, f"the {gpus} {of}"))
    return layout


def _takes_the_rest(reader: Reader, engine: Engine | None) -> str:
    """The axis that takes the GPUs that the others leave: `--dp-shard`, or where it would shard nothing, because ZeRO
    is 0, plain data parallel.
    """
    zero = reader.word("zero") or (str(engine.default_zero) if engine is not None else "")
    plain = zero == "0" and not reader.said("dp_replicate") and not reader.said("dp_shard")
    return "dp_replicate" if plain else "dp_shard"


def _gpus_left(reader: Reader, sizes: Mapping[str, int], gpus: int | None, takes: str) -> int | None:
    """What that axis takes: None where the other axes do not divide the GPUs."""
    if gpus is None or reader.said("dp_shard"):
        return 1
    left, rest = divmod(gpus, prod(sizes.values()))
    if rest:
        return None
    why = ", since zero 0 shards nothing" if takes == "dp_replicate" and left > 1 else ""
    reader.defaults.append(f"{takes} {left}{why}")
    return left


def _none_left(sizes: Mapping[str, int], gpus: str) -> str:
    product = " · ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    ranks = f"{product} = {prod(sizes.values())} ranks"
    return f"{ranks}, which do not divide {gpus}: none are left for --dp-shard"


def _structure(reader: Reader, sizes: Mapping[str, int], engine: Engine | None) -> Structure:
    tensor = "none"
    if sizes["tp"] > 1:
        default_sp = engine.default_sp if engine is not None else True
        tensor = "sequence" if reader.switch("sp", default_sp) else "tensor"
        if not reader.said("sp") and default_sp:
            reader.defaults.append("sequence parallel, since tp > 1")
    zero = reader.choice("zero", str(engine.default_zero) if engine is not None else "0")
    if not reader.said("zero"):
        reader.defaults.append(f"zero {zero}")
    cp_kind = reader.choice("cp_kind", "ring")
    if sizes["cp"] == 1 and reader.said("cp_kind"):
        reader.reasons.append(f"--cp-kind {cp_kind} is for --cp over 1")
    if sizes["cp"] > 1 and not reader.said("cp_kind"):
        reader.defaults.append(f"cp_kind {cp_kind}")
    chosen: dict[str, Any] = {
        "tensor": tensor,
        "cp_kind": cp_kind if sizes["cp"] > 1 else "none",
        **_recompute(reader),
        **_loss(reader),
        **_placement(reader),
        **offloaded(reader),
        "fp8_gather": reader.switch("fp8_gather", False),
        "schedule": (schedule := reader.choice("schedule", "1f1b")),
        "virtual_stages": _virtual_stages(reader, schedule, sizes["pp"]),
        "attention": reader.choice("attention", "flash"),
        "hpz": reader.switch("hpz", False),
        "tp_overlap": reader.switch("tp_overlap", False),
        **{name: reader.choice(name, getattr(Structure, name)) for name in ("dispatcher", "dispatch_dtype")},
    }
    reshard = reader.switch("reshard", bool(engine.default_reshard(sizes["pp"])) if engine is not None else True)
    if zero == "3" and not reshard and not reader.said("reshard"):
        reader.defaults.append("no reshard, since pp > 1")
    compiled = reader.switch("compile", False)
    own = sizes["ep"] > 1 or sizes["etp"] != sizes["tp"]
    return Structure(
        zero=int(zero), reshard=reshard, pipelined=sizes["pp"] > 1, compile=compiled, own_experts=own, **chosen
    )


def _loss(reader: Reader) -> dict[str, Any]:
    """How the loss holds its logits; chunks are a chunked loss's."""
    loss, chunks = reader.choice("loss", "full"), reader.whole("loss_chunks", Structure.loss_chunks)
    if reader.said("loss_chunks") and loss != "chunked":
        reader.reasons.append(f"--loss-chunks {shown(str(reader.word('loss_chunks')))} is for --loss chunked")
    if loss == "chunked" and not reader.said("loss_chunks"):
        reader.defaults.append(f"loss_chunks {chunks}")
    return {"loss": loss, "loss_chunks": chunks}


def _recompute(reader: Reader) -> dict[str, Any]:
    """How much is recomputed: a word for it, or modules by an engine's names, which it knows."""
    word = reader.word("recompute") or "none"
    layers = reader.whole("recompute_layers", 0)
    if reader.said("recompute_layers") and layers < 1 and not reader.unread:
        reader.reasons.append(f"--recompute-layers {layers} must be at least 1")
    some = {"recompute_layers": layers}
    some |= {name: reader.whole(name, 1) for name in ("recompute_every", "recompute_chunk")}
    names = tuple(dict.fromkeys(name.strip() for name in word.split(",")))
    if names and set(names) <= set(RECOMPUTE_MODULES):
        return {"recompute": "selective", "recompute_modules": tuple(sorted(names)), **some}
    return {
        "recompute": reader.choice("recompute", "none", f", or of {', '.join(RECOMPUTE_MODULES)} (megatron)"),
        **some,
    }


def _placement(reader: Reader) -> dict[str, Any]:
    """How layers are cut into stages, where the user says so."""
    weights = (name for name in ("embedding_weight", "head_weight") if reader.said(name))
    layers = {name: reader.whole(name, 0) for name in ("first_stage_layers", "last_stage_layers")}
    return layers | {name: reader.whole(name, 0, least=0) for name in weights}


def _virtual_stages(reader: Reader, schedule: str, pp: int) -> int:
    """Stages of a rank: two, where the schedule has several and the user does not say how many."""
    default = 1 if schedule in ONE_STAGE or pp == 1 else 2
    if default > 1 and not reader.said("virtual_stages"):
        reader.defaults.append(f"virtual_stages {default}")
    return reader.whole("virtual_stages", default)


def _rank_order(reader: Reader) -> tuple[str, ...]:
    word = reader.flags.get("rank_order")
    if not isinstance(word, str):
        return AXES
    axes = tuple(axis.strip() for axis in word.split(","))
    if sorted(axes) != sorted(AXES):
        reader.reasons.append(f"--rank-order {shown(word)}: must name each of {','.join(AXES)} once, outermost first")
        return AXES
    return axes
