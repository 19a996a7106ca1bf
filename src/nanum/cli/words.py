"""From the user's words to the four nouns. Every reason why they cannot be read is collected, and raised at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from nanum.cli import expert_words
from nanum.cli.offloading import offloaded
from nanum.errors import Refused
from nanum.job import (
    ALL,
    Job,
    LoraTargets,
    Optimizer,
    Precision,
    Quantized,
    Trained,
    TrainedWeights,
    default_global_batch_size,
    default_seq_len,
)
from nanum.layout import (
    AXES,
    ONE_STAGE,
    RECOMPUTE_MODULES,
    ContextParallel,
    DispatchDtype,
    Dispatcher,
    GradSync,
    Layout,
    Loss,
    Recompute,
    Schedule,
    Structure,
)
from nanum.units import whole_number

if TYPE_CHECKING:
    from nanum.cluster import Cluster
    from nanum.engines.engine import Engine
    from nanum.model import Model

Flags = Mapping[str, str | bool | None]
"""Flags by their Python names (`seq_len`), as text; None where the user said nothing."""
T = TypeVar("T")

DEFAULT_TOP = 10
DEFAULT_ENGINE = "torchtitan"
ANY_ENGINE = "any"  # of plan: every engine's layouts, ranked together

# The words of each choice: those modelled, then those that exist but are not modelled yet.
CHOICES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "precision": (get_args(Precision), ()),
    "optimizer": (get_args(Optimizer), ()),
    "train": (get_args(TrainedWeights), ()),
    "lora_targets": (get_args(LoraTargets), ()),
    "quantize": (get_args(Quantized), ("int8",)),
    "zero": (("0", "1", "2", "3"), ()),
    "schedule": (get_args(Schedule), ()),
    "recompute": (get_args(Recompute), ()),
    "attention": (("flash", "eager"), ()),
    "loss": (get_args(Loss), ()),
    "grad_sync": (get_args(GradSync), ()),
    "dispatcher": (get_args(Dispatcher), ()),
    "dispatch_dtype": (get_args(DispatchDtype), ()),
    "cp_kind": (tuple(kind for kind in get_args(ContextParallel) if kind != "none"), ()),
}


@dataclass(frozen=True)
class Question:
    """What is asked of a cluster, whatever the layout. `defaults` says, flag by flag, what the user left to us."""

    model: Model
    job: Job
    cluster: Cluster
    engine: Engine
    defaults: tuple[str, ...]
    engine_name: str  # "any" where a plan compares all of them


@dataclass
class Reader:
    """Reads flags one by one; a flag that cannot be read leaves a reason and answers with its default."""

    flags: Flags
    reasons: list[str] = field(default_factory=list)
    unread: bool = False  # a number could not be read: what would follow from it is not known
    none_left: bool = False  # the axes do not divide the GPUs, and dp_shard is not known
    defaults: list[str] = field(default_factory=list)

    def whole(self, name: str, default: int, *, least: int = 1) -> int:
        """A whole number, from 1 or from 0; not recorded as a default, since 1 is what an unsaid axis means."""
        word = self.word(name)
        if word is None:
            return default
        try:
            number = whole_number(word, least)
        except ValueError as error:
            self.reasons.append(f"{_flag(name)} {_short(word)} {error}")
            self.unread = True
            return default
        return number

    def choice(self, name: str, default: str, or_else: str = "") -> str:
        """One of a flag's words; `or_else` says what it may be besides, which the caller reads."""
        word = self.word(name)
        if word is None:
            return default
        modelled, known = CHOICES[name]
        if word in modelled:
            return word
        if word in known:
            instead = f"choose {_either(modelled)}" if modelled else "leave it out"
            self.reasons.append(f"{_flag(name)} {word} is not modelled yet: {instead}")
        else:
            self.reasons.append(f"{_flag(name)} {_short(word)}: must be {_either(modelled + known)}{or_else}")
        return default

    def ratio(self, name: str, least: float, must: str) -> float | None:
        """A number from `least` to a million, which `must` says in words; None where the user said none."""
        if (word := self.word(name)) is None:
            return None
        try:
            number = float(word)
        except ValueError:
            number = 0.0
        if least <= number <= 1e6:
            return number
        self.reasons.append(f"{_flag(name)} {_short(word)}: {must}, and at most a million")
        return None

    def switch(self, name: str, default: bool) -> bool:
        value = self.flags.get(name)
        return value if isinstance(value, bool) else default

    def said(self, name: str) -> bool:
        return self.flags.get(name) is not None

    def word(self, name: str) -> str | None:
        """What the user said, or None."""
        value = self.flags.get(name)
        return value.strip() if isinstance(value, str) else None


def plan_question(model_word: str, cluster_word: str, flags: Flags) -> tuple[Question, int]:
    """Read what `plan` asks: a question, and how many layouts to show. Raises Refused with every reason."""
    any_engine = flags.get("engine") == ANY_ENGINE
    reader = Reader({**flags, "engine": DEFAULT_ENGINE} if any_engine else flags)
    asked = question_of(model_word, cluster_word, reader)
    readable = not reader.unread  # of what is asked: how many layouts to show is not of it
    top = reader.whole("top", DEFAULT_TOP)
    if asked is not None and readable and reader.reasons:
        from nanum.rules import OF_JOB, broken

        reader.reasons += broken(OF_JOB, asked.model, asked.job, asked.cluster, Layout())
    if asked is None or reader.reasons:
        raise Refused(reader.reasons)
    return replace(asked, engine_name=ANY_ENGINE) if any_engine else asked, top


def question_and_layout(model_word: str, cluster_word: str, flags: Flags) -> tuple[Question, Layout]:
    """Read what `predict` asks: a question and the layout that is to answer it.

    Raises Refused with every reason; the broken rules too, where all words can be read but no GPUs are left.
    """
    reader = Reader(flags)
    asked = question_of(model_word, cluster_word, reader)
    engine = asked.engine if asked is not None else None
    layout = layout_of(reader, engine, asked.cluster.gpus if asked is not None else None)
    if asked is None or reader.unread:
        raise Refused(reader.reasons)
    if layout.structure.dispatcher == "flex":
        from nanum.rules.dispatch import on_nodes

        layout = on_nodes(layout, asked.cluster.gpus_per_node)
    if reader.none_left:
        reader.reasons += broken_rules(asked, layout, without_world=True)
    elif reader.reasons:
        reader.reasons += broken_rules(asked, layout, without_world=False)
    if reader.reasons:
        raise Refused(reader.reasons)
    return Question(
        asked.model, asked.job, asked.cluster, asked.engine, tuple(reader.defaults), asked.engine.name
    ), layout


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


def question_of(model_word: str, cluster_word: str, reader: Reader) -> Question | None:
    """What is asked of a cluster; None where model or cluster cannot be read. Reasons are left with the reader."""
    from nanum.cluster import load as load_cluster
    from nanum.engines import load as load_engine
    from nanum.model import load as load_model

    model = loaded(load_model, model_word, reader)
    cluster = loaded(load_cluster, cluster_word, reader)
    engine = loaded(load_engine, DEFAULT_ENGINE if (said := reader.word("engine")) is None else _short(said), reader)
    if engine is None:  # its own rules are not known: the rest is read as for the default, without its rules
        engine = replace(load_engine(DEFAULT_ENGINE), rules=())
    if model is not None:
        model = _predicting(reader, model)
    job = _job(reader, model)
    if not reader.said("engine"):
        reader.defaults.append(f"engine {DEFAULT_ENGINE}")
    if model is None or cluster is None:
        return None
    return Question(model, job, cluster, engine, tuple(reader.defaults), engine.name)


def _predicting(reader: Reader, model: Model) -> Model:
    """With as many modules of multi-token prediction as are said: without, what most train of a published model."""
    from nanum.model import WITHOUT_MTP

    if WITHOUT_MTP in model.left_out and not reader.said("mtp_layers"):
        reader.defaults.append("mtp_layers 0")
    return model.predicting(reader.whole("mtp_layers", 0, least=0))


def loaded(load: Callable[[str], T], word: str, reader: Reader) -> T | None:
    try:
        return load(word)
    except Refused as refused:
        reader.reasons.extend(refused.reasons)
        return None


def _job(reader: Reader, model: Model | None) -> Job:
    seq_len = reader.whole("seq_len", default_seq_len(model.max_position_embeddings) if model is not None else 1)
    if not reader.said("seq_len"):
        reader.defaults.append(f"seq_len {seq_len}")
    pictures = model is not None and model.patches is not None
    global_batch_size = reader.whole("global_batch_size", default_global_batch_size(seq_len, fixed=pictures))
    if not reader.said("global_batch_size"):
        reader.defaults.append(f"global_batch_size {global_batch_size}")
    chosen: dict[str, Any] = {}
    for name, default in (("precision", "bf16"), ("optimizer", "adamw")):
        chosen[name] = reader.choice(name, default)
        if not reader.said(name):
            reader.defaults.append(f"{name} {default}")
    chosen |= {"expert_imbalance": expert_words.imbalance(reader), "routing": expert_words.routing(reader)}
    return Job(seq_len, global_batch_size, trained=trained(reader), **chosen)


def trained(reader: Reader) -> Trained:
    """What the flags say is trained: beside adapters nothing else, unless that is said too."""
    rank = reader.whole("lora_rank", 0)
    if rank < 1 and reader.said("lora_rank") and not reader.unread:
        reader.reasons.append(f"--lora-rank {rank}: must be at least 1")
        rank = 0
    if rank == 0 and reader.said("lora_targets"):
        reader.reasons.append("--lora-targets says which layers have adapters: add --lora-rank")
    weights: Any = reader.choice("train", "none" if rank else ALL.weights)
    if rank and not reader.said("train"):
        reader.defaults.append("train none, beside adapters")
    targets: Any = reader.choice("lora_targets", ALL.lora_targets)
    quantize: Any = reader.choice("quantize", ALL.quantize)
    return Trained(weights, rank, targets, quantize)


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


def broken_rules(asked: Question, layout: Layout, *, without_world: bool) -> list[str]:
    """What else is wrong with a layout; `without_world` where its `dp_shard` is not known."""
    from nanum.rules import GENERAL, WORLD, broken

    rules = [rule for rule in (*GENERAL, *asked.engine.refuses) if not (without_world and rule is WORLD)]
    return broken(rules, asked.model, asked.job, asked.cluster, layout)


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
        reader.reasons.append(f"--loss-chunks {_short(str(reader.word('loss_chunks')))} is for --loss chunked")
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
        reader.reasons.append(f"--rank-order {_short(word)}: must name each of {','.join(AXES)} once, outermost first")
        return AXES
    return axes


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _short(word: str) -> str:
    return repr(word) if not word or word != word.strip() else word if len(word) <= 24 else f"{word[:20]}…"


def _either(words: tuple[str, ...]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
