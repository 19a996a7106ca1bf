"""From the user's words to the four nouns. Every reason why they cannot be read is collected, and raised at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanum.cli import expert_words
from nanum.cli.layout_words import layout_of
from nanum.cli.reader import Flags, Reader, loaded, shown
from nanum.errors import Refused
from nanum.job import ALL, Job, Trained, default_global_batch_size, default_seq_len
from nanum.layout import Layout, Structure

if TYPE_CHECKING:
    from nanum.cluster import Cluster
    from nanum.engines.engine import Engine
    from nanum.model import Model

DEFAULT_TOP = 10
DEFAULT_ENGINE = "torchtitan"
ANY_ENGINE = "any"  # of plan: every engine's layouts, ranked together


@dataclass(frozen=True)
class Question:
    """What is asked of a cluster, whatever the layout. `defaults` says, flag by flag, what the user left to us."""

    model: Model
    job: Job
    cluster: Cluster
    engine: Engine
    defaults: tuple[str, ...]
    engine_name: str  # "any" where a plan compares all of them


def plan_question(model_word: str, cluster_word: str, flags: Flags) -> tuple[Question, int, Structure]:
    """Read what `plan` asks: a question, how many layouts to show, and what all of them have in common.

    Raises Refused with every reason.
    """
    any_engine = flags.get("engine") == ANY_ENGINE
    reader = Reader({**flags, "engine": DEFAULT_ENGINE} if any_engine else flags)
    asked = question_of(model_word, cluster_word, reader)
    readable = not reader.unread  # of what is asked: how many layouts to show is not of it
    like: Any = {name: reader.choice(name, getattr(Structure, name)) for name in ("dispatcher", "dispatch_dtype")}
    like |= {name: reader.switch(name, False) for name in ("tp_overlap", "compile")}
    readable = readable and not reader.unread
    top = reader.whole("top", DEFAULT_TOP)
    if asked is not None and readable:
        reader.reasons += _wrong_with_dispatch(asked, Structure(own_experts=True, **like))
        reader.reasons += _wrong_with_kernels(asked, Structure(**like), any_engine=any_engine)
    if asked is not None and readable and reader.reasons:
        from nanum.rules import OF_JOB, broken

        reader.reasons += broken(OF_JOB, asked.model, asked.job, asked.cluster, Layout())
    if asked is None or reader.reasons:
        raise Refused(reader.reasons)
    left = tuple(f"no --{name.replace('_', '-')}" for name in _left_out(asked, reader) if not any_engine)
    asked = replace(
        asked, defaults=(*asked.defaults, *left), engine_name=ANY_ENGINE if any_engine else asked.engine_name
    )
    return asked, top, Structure(**like)


def _left_out(asked: Question, reader: Reader) -> list[str]:
    """What could make kernels faster, was not said, and is not tried."""
    could = {"compile": not _wrong_with_kernels(asked, Structure(compile=True), any_engine=False)}
    could["tp_overlap"] = asked.engine.tp_overlap != "none"
    return [name for name, here in could.items() if here and not reader.said(name)]


def _wrong_with_dispatch(asked: Question, structure: Structure) -> list[str]:
    """Why tokens cannot come to experts so, in any layout: of two ranks of experts, what would be well otherwise."""
    from nanum.model import Experts
    from nanum.rules.dispatch import on_nodes

    structure = replace(structure, tp_overlap=False, compile=False)
    usual = replace(structure, dispatcher=Structure.dispatcher, dispatch_dtype=Structure.dispatch_dtype)
    if structure == usual:
        return []
    if not any(isinstance(layer.mlp, Experts) for layer in asked.model.kinds):
        return [f"--dispatcher and --dispatch-dtype are of experts, and {asked.model.name} has none"]
    pair = Layout(dp_shard=2, ep=2, structure=structure)
    said, plain = (
        broken_rules(asked, on_nodes(replace(pair, structure=each), asked.cluster.gpus_per_node), without_world=True)
        for each in (structure, usual)
    )
    return [reason for reason in said if reason not in plain]


def _wrong_with_kernels(asked: Question, structure: Structure, *, any_engine: bool) -> list[str]:
    """Why no layout can have such kernels: of two ranks of tensor parallelism, what would be well otherwise."""
    if structure.compile and any_engine:
        return [f"--compile with --engine {ANY_ENGINE}: name an engine that compiles"]
    if any_engine or not (structure.tp_overlap or structure.compile):
        return []
    said, plain = (
        broken_rules(asked, Layout(tp=2, structure=each), without_world=True)
        for each in (replace(structure, tensor="sequence"), Structure(tensor="sequence"))
    )
    return [reason for reason in said if reason not in plain]


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


def _engine(reader: Reader) -> Engine | None:
    """The one that is said, or the default; None where there is none such."""
    from nanum.engines import load as load_engine

    said = reader.word("engine")
    if said == ANY_ENGINE:
        reader.reasons.append(f"--engine {ANY_ENGINE} is for plan, which compares engines: name one")
        return None
    return loaded(load_engine, DEFAULT_ENGINE if said is None else shown(said), reader)


def question_of(model_word: str, cluster_word: str, reader: Reader) -> Question | None:
    """What is asked of a cluster; None where model or cluster cannot be read. Reasons are left with the reader."""
    from nanum.cluster import load as load_cluster
    from nanum.engines import load as load_engine
    from nanum.model import load as load_model

    model = loaded(load_model, model_word, reader)
    cluster = loaded(load_cluster, cluster_word, reader)
    engine = _engine(reader)
    if engine is None:  # its own rules are not known: the rest is read as for the default, without its rules
        engine = replace(load_engine(DEFAULT_ENGINE), rules=())
    if model is not None:
        model = _predicting(reader, model)
    job = _job(reader, model, cluster.gpus if cluster is not None else 1)
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


def _job(reader: Reader, model: Model | None, gpus: int) -> Job:
    seq_len = reader.whole("seq_len", default_seq_len(model.max_position_embeddings) if model is not None else 1)
    if not reader.said("seq_len"):
        reader.defaults.append(f"seq_len {seq_len}")
    pictures = model is not None and model.patches is not None
    global_batch_size = reader.whole("global_batch_size", default_global_batch_size(seq_len, fixed=pictures, gpus=gpus))
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


def broken_rules(asked: Question, layout: Layout, *, without_world: bool) -> list[str]:
    """What else is wrong with a layout; `without_world` where its `dp_shard` is not known."""
    from nanum.rules import GENERAL, WORLD, broken

    rules = [rule for rule in (*GENERAL, *asked.engine.refuses) if not (without_world and rule is WORLD)]
    return broken(rules, asked.model, asked.job, asked.cluster, layout)
