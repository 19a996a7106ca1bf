"""What an engine file states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nanum.arrays import least, most
from nanum.cluster import Cluster
from nanum.conventions import Conventions, Numerics, TpBehind
from nanum.engines.evened import evened_ends
from nanum.job import Job, Optimizer
from nanum.layout import ONE_CHUNK, ContextParallel, Dispatcher, Layout, Loss, Schedule, Structure
from nanum.model import Model
from nanum.rules import Rule
from nanum.rules.dispatch import dispatcher_rule
from nanum.rules.experts import capacity_rule
from nanum.rules.loss import loss_rule
from nanum.rules.mtp import mtp_rule
from nanum.rules.overlap import tp_overlap_rules
from nanum.rules.placement import placement_rules
from nanum.rules.recompute import SomeLayers, recompute_rules
from nanum.rules.stacks import pipeline_rule
from nanum.schedule import stages_of
from nanum.states import States

NOTHING_SAID = Structure()
"""Of the ends of a pipeline."""
DataParallel = Literal["fully_shard", "plain_or_fully_shard", "flat_buffers", "partitioned", "accumulated"]


@dataclass(frozen=True)
class Engine:
    """`layers_of_stage(num_hidden_layers, stages, stage)` is its rule for uneven stages, for ints and arrays. `rules`
    are its own reasons to refuse a layout, `refuses` these and what follows from the other fields.
    """

    name: str
    version: str
    default_zero: int
    searched_zero_stages: tuple[int, ...]  # those that a plan tries
    data_parallel: DataParallel
    conventions: Callable[[Model, Job, Structure], Conventions]
    layers_of_stage: Callable[[int, Any, Any], Any]
    rules: tuple[Rule, ...]
    default_etp: Callable[[Any], Any] = lambda tp: 1  # of experts that are spread, beside tp
    default_reshard: Callable[[int], bool] = lambda pp: True  # are weights resharded after forward, with pp stages?
    schedules: tuple[Schedule, ...] = ONE_CHUNK  # that it has
    fp8: bool = False  # has it linear layers of fp8?
    fp8_gathers: bool = False  # and can it gather their weights so?
    default_sp: bool = True  # is tensor parallelism sequence parallel too, unless it is said?
    layers_by_model: Callable[[Model, Any, Any], Any] | None = None  # the same rule, where it weighs the parts
    recompute_modules: tuple[str, ...] = ()  # that a selective recompute may name
    recomputes: tuple[SomeLayers, ...] = ()  # which layers of a stage it can recompute and not the others
    losses: tuple[Loss, ...] = ("full",)  # that it has
    drops_tokens: bool = False  # may its experts have a capacity?
    tp_overlap: TpBehind = "none"  # which exchanges of tensor parallelism it can run beside products
    hpz: bool = False  # has it second shares of ZeRO-3's weights?
    searched_cp_kinds: tuple[ContextParallel, ...] = ("ring",)  # those that a plan tries
    dispatchers: tuple[Dispatcher, ...] = ("alltoall",)  # of tokens to experts
    sets_stages: bool = False  # may the layers of the first and the last stage be said?
    evens_ends: bool = False  # must they be, where layers do not divide? A plan then says them
    end_weights: tuple[int, int] | None = None  # of embedding and head, in layers, where others may be said
    lacks_mtp: str = "megatron has it"  # why it has no multi-token prediction, where it has none

    @property
    def refuses(self) -> tuple[Rule, ...]:
        return (
            _empty_stage_rule(self),
            *self.rules,
            _schedule_rule(self.name, self.schedules),
            *(() if self.fp8 else (_fp8_rule(self.name),)),
            *(() if self.drops_tokens else (capacity_rule(self.name),)),
            dispatcher_rule(self.name, self.dispatchers),
            _hpz_rule(self.name, has=self.hpz),
            *(() if self.fp8_gathers else (_fp8_gather_rule(self.name),)),
            *tp_overlap_rules(self.name, has=self.tp_overlap != "none", compiled=self.tp_overlap == "own"),
            *recompute_rules(self.name, self.recompute_modules, self.recomputes),
            loss_rule(self.name, self.losses),
            mtp_rule(self.name, self.lacks_mtp),
            *placement_rules(
                self.name,
                sets_stages=self.sets_stages,
                weighs_ends="torchtitan, megatron and torch have it" if self.end_weights is None else "",
            ),
            _untrained_stage_rule(self),
            _negative_stage_rule(self),
            pipeline_rule(self.name),
        )

    def weights(self, structure: Structure) -> tuple[int, int]:
        """Layers that the embedding and the head count as: as `structure` says, or the engine's own."""
        if self.end_weights is None:
            return 0, 0
        embedding, head = self.end_weights
        said = structure.embedding_weight, structure.head_weight
        return embedding if said[0] is None else said[0], head if said[1] is None else said[1]

    def most_stages(self, model: Model, structure: Structure) -> int:
        """So many have a layer or an end each: an end that is weighed may be a stage of its own."""
        weighed = not (structure.sets_stages or structure.evens_ends)
        return model.num_hidden_layers + (sum(self.weights(structure)) if weighed else 0)

    def layers(self, model: Model, stages: Any, stage: Any, structure: Structure = NOTHING_SAID) -> Any:
        """How many layers a stage has: by what `structure` says of the ends, or by the engine's own rule."""
        layers = model.num_hidden_layers
        if structure.evens_ends:
            return layers_beside(layers, stages, stage, *evened_ends(layers, stages))
        if structure.sets_stages:
            chunks = structure.virtual_stages if structure.pipelined else 1
            ends = structure.first_stage_layers, structure.last_stage_layers
            return layers_beside(layers, stages, stage, *ends, chunks)
        if structure.weighs_ends and self.end_weights is not None:
            return weighed_layers(layers, stages, stage, *self.weights(structure))
        if self.layers_by_model is not None:
            return self.layers_by_model(model, stages, stage)
        return self.layers_of_stage(layers, stages, stage)


RUNS: dict[Schedule, str] = {
    "gpipe": "torchtitan, torch, megatron and nanotron have it",
    "interleaved": "torchtitan, torch and megatron have it",
    "looped-bfs": "torchtitan and torch have it",
    "zb-h1": "torchtitan and torch have it",
    "zb-h2": "of the zero-bubble fork of Megatron-LM by its authors (sail-sg/zero-bubble-pipeline-parallelism)",
    "zbv": "torchtitan and torch have it",
    "dualpipe": "DeepSeek's own DualPipe library has it (deepseek-ai/DualPipe), torchtitan and torch its V, dualpipev",
    "dualpipev": "torchtitan and torch have it",
}
"""Who runs a schedule that not every engine has."""


def rank_rule(engine: str, axis: str, why: str) -> Rule:
    """Refuses an axis that an engine does not have."""
    return Rule(
        f"{engine} has no {axis}",
        lambda model, job, cluster, layout: getattr(layout, axis) > 1,
        lambda model, job, cluster, layout: f"{axis}={getattr(layout, axis)} is not for {engine}: {why}",
    )


def two_blocks_rule(engine: str, what: str) -> Rule:
    """Refuses a sequence of which ranks cannot take one block from each end, as they do where attention is causal."""
    return Rule(
        what,
        # Where cp itself does not divide, that is said instead; a cp of 0 is another rule's.
        lambda model, job, cluster, layout: (
            (layout.cp > 1)
            & (job.seq_len % (layout.cp + (layout.cp == 0)) == 0)
            & (job.seq_len % (2 * layout.cp + (layout.cp == 0)) != 0)
        ),
        lambda model, job, cluster, layout: (
            f"2·cp={2 * layout.cp} does not divide seq_len={job.seq_len}: a rank takes one block from each end "
            f"({engine})"
        ),
    )


def recompute_rule(engine: str, why: str) -> Rule:
    """Refuses selective recompute."""
    return Rule(
        f"{engine} recomputes whole layers or none",
        lambda model, job, cluster, layout: layout.structure.recompute == "selective",
        lambda model, job, cluster, layout: f"--recompute selective is not for {engine}: {why}",
    )


def _schedule_rule(engine: str, schedules: tuple[Schedule, ...]) -> Rule:
    """Refuses the pipeline schedules that an engine does not have."""
    lacks = [schedule for schedule in RUNS if schedule not in schedules]
    return Rule(
        f"{engine} has no such schedule",
        lambda model, job, cluster, layout: (layout.pp > 1) & (layout.structure.schedule in lacks),
        lambda model, job, cluster, layout: (
            f"schedule={layout.structure.schedule} is not in {engine}: {RUNS[layout.structure.schedule]}"
        ),
    )


def _stages_said(layout: Layout) -> str:
    chunks = layout.structure.virtual_stages
    return f"pp={layout.pp}" if chunks == 1 else f"pp·virtual_stages = {layout.pp}·{chunks}"


def _empty_stage_rule(engine: Engine) -> Rule:
    """Refuses stages without a layer that have no end of the model either."""

    def too_many(model: Model, job: Job, cluster: Cluster, layout: Layout) -> Any:
        return layout.pp * layout.structure.virtual_stages > engine.most_stages(model, layout.structure)

    def say(model: Model, job: Job, cluster: Cluster, layout: Layout) -> str:
        layers = model.num_hidden_layers
        beside = engine.most_stages(model, layout.structure) - layers
        ends = f" and the {beside} that its ends weigh" if beside else ""
        return f"{_stages_said(layout)} exceeds num_hidden_layers={layers}{ends}"

    return Rule("pp times the virtual stages exceeds num_hidden_layers", too_many, say)


def _untrained_stage_rule(engine: Engine) -> Rule:
    """Refuses an end of the pipeline that is a stage of its own, where it is frozen."""

    def lone_ends(model: Model, layout: Layout) -> tuple[Any, Any]:
        structure = layout.structure
        stages = stages_of(structure.schedule, layout.pp, structure.virtual_stages if structure.pipelined else 1)
        stages = least(stages, engine.most_stages(model, structure))  # more are refused elsewhere
        first, last = (engine.layers(model, stages, stage, structure) for stage in (0 * stages, stages - 1))
        return (first < 1) & (layout.pp > 1), (last < 1) & (layout.pp > 1)

    def broken(model: Model, job: Job, cluster: Cluster, layout: Layout) -> Any:
        if job.trained.ends:
            return False
        first, last = lone_ends(model, layout)
        return first | last

    return Rule(
        f"a stage has nothing to train ({engine.name})",
        broken,
        lambda model, job, cluster, layout: (
            f"pp={layout.pp} leaves the {'embedding' if lone_ends(model, layout)[0] else 'head'} alone on a stage, "
            f"where --train {job.trained.weights} trains nothing: take fewer stages, or --train ends ({engine.name})"
        ),
    )


def _hpz_rule(engine: str, *, has: bool) -> Rule:
    """Refuses second shares of ZeRO-3's weights, or those that would be none."""
    if not has:
        return Rule(
            f"{engine} has no hpZ",
            lambda model, job, cluster, layout: layout.structure.hpz,
            lambda model, job, cluster, layout: f"--hpz is not in {engine}: deepspeed has it",
        )
    return Rule(
        "hpZ without groups",
        lambda model, job, cluster, layout: (
            layout.structure.hpz
            and (layout.structure.zero != 3) | (layout.dp_replicate < 2) | (layout.dp_shard * layout.cp < 2)
        ),
        lambda model, job, cluster, layout: (
            f"--hpz shards weights (--zero 3) over all data ranks and again within each of several groups: "
            f"zero={layout.structure.zero}, dp_replicate={layout.dp_replicate} groups of dp_shard·cp="
            f"{layout.dp_shard * layout.cp} ranks ({engine})"
        ),
    )


def _negative_stage_rule(engine: Engine) -> Rule:
    """Refuses ends that weigh more than a stage's share (torchtitan: `input_weight exceeds minimum layers per stage`;
    Megatron-LM: `Not enough layers`).
    """

    def broken(model: Model, job: Job, cluster: Cluster, layout: Layout) -> Any:
        structure = layout.structure
        if engine.end_weights is None or not structure.weighs_ends:
            return False
        weights = engine.weights(structure)
        stages = stages_of(structure.schedule, layout.pp, structure.virtual_stages if structure.pipelined else 1)
        return (layout.pp > 1) & (max(weights) > (model.num_hidden_layers + sum(weights)) // most(stages, 1))

    return Rule(
        f"an end weighs more than a stage has ({engine.name})",
        broken,
        lambda model, job, cluster, layout: (
            "embedding_weight={} and head_weight={}: an end weighs more than the layers of the ".format(
                *engine.weights(layout.structure)
            )
            + f"smallest of {_stages_said(layout)} stages of num_hidden_layers={model.num_hidden_layers} "
            f"({engine.name})"
        ),
    )


def _fp8_rule(engine: str) -> Rule:
    return Rule(
        f"{engine} in fp8 is not modelled",
        lambda model, job, cluster, layout: job.precision == "fp8",
        lambda model, job, cluster, layout: (
            f"--precision fp8 is not modelled for {engine}: torchtitan, torch and megatron have it"
        ),
    )


def _fp8_gather_rule(engine: str) -> Rule:
    version = " any more: its recipes scale by rows, and gather in bf16" if engine == "torchtitan" else ""
    return Rule(
        f"{engine} gathers no weights in fp8",
        lambda model, job, cluster, layout: layout.structure.fp8_gather,
        lambda model, job, cluster, layout: (
            f"--fp8-gather is not in {engine}{version}; torch, with torchao's linear layers, and megatron have it"
        ),
    )


def eager_rule(engine: str, why: str) -> Rule:
    """Refuses `compile` where it says nothing about an engine's kernels."""
    return Rule(
        f"compile is not {engine}'s",
        lambda model, job, cluster, layout: layout.structure.compile,
        lambda model, job, cluster, layout: f"--compile is not for {engine}: {why}",
    )


def zero_rule(engine: str, stages: tuple[int, ...], why: str) -> Rule:
    """Refuses the ZeRO stages that an engine does not have."""
    return Rule(
        f"{engine} has no such ZeRO stage",
        lambda model, job, cluster, layout: layout.structure.zero not in stages,
        lambda model, job, cluster, layout: f"zero={layout.structure.zero} is not in {engine}: {why}",
    )


def unsharded_rule(engine: str, instead: Callable[[int], str] = lambda dp_shard: "use dp_replicate") -> Rule:
    """Refuses ranks that should shard where nothing is sharded; `instead(dp_shard)` says what is meant by them."""
    return Rule(
        "zero 0 with dp_shard > 1",
        lambda model, job, cluster, layout: (layout.structure.zero == 0) & (layout.dp_shard > 1),
        lambda model, job, cluster, layout: (
            f"zero=0 shards nothing, but dp_shard={layout.dp_shard}: {instead(layout.dp_shard)} ({engine})"
        ),
    )


def one_group_rule(engine: str, stages: tuple[int, ...], does: str, besides: str = "") -> Rule:
    """Refuses replicas of sharded groups, where the engine shards over all data ranks; `does` says what it does."""
    return Rule(
        f"{engine} shards over all data ranks",
        lambda model, job, cluster, layout: (layout.structure.zero in stages) & (layout.dp_replicate > 1),
        lambda model, job, cluster, layout: (
            f"zero={layout.structure.zero} {does}, but dp_replicate={layout.dp_replicate}: use dp_shard alone"
            f"{besides} ({engine})"
        ),
    )


def optimizer_rule(engine: str, lacks: Mapping[Optimizer, str]) -> Rule:
    """Refuses the optimizers that an engine does not have, each with the reason."""
    return Rule(
        f"{engine} has no such optimizer",
        lambda model, job, cluster, layout: job.optimizer in lacks,
        lambda model, job, cluster, layout: f"--optimizer {job.optimizer} is not for {engine}: {lacks[job.optimizer]}",
    )


def muon_rule(engine: str, cut: Callable[[Layout], Any], why: str) -> Rule:
    """Refuses Muon where matrices are cut: its step is of whole ones."""
    return Rule(
        f"Muon's matrices are cut ({engine})",
        lambda model, job, cluster, layout: (job.optimizer == "muon") & cut(layout),
        lambda model, job, cluster, layout: f"--optimizer muon takes its step on whole matrices, and {why} ({engine})",
    )


def fsdp_numerics(job: Job) -> Numerics:
    """fp32 shards, states and reductions; computed in the job's precision."""
    return Numerics("fp32", job.dtype, "fp32", States(job.optimizer, "fp32", counters=True))


def weighed_layers(num_hidden_layers: int, pp: Any, stage: Any, embedding: int = 1, head: int = 1) -> Any:
    """torchtitan's rule: embedding and head weigh a layer each, or as many as is said, and what does not divide goes to
    the first stages. (Megatron-LM's is the same, where it divides.)
    """
    weighed = num_hidden_layers + embedding + head
    share = weighed // pp + (stage < weighed % pp)
    return where_pipelined(pp, share - (stage == 0) * embedding - (stage == pp - 1) * head, num_hidden_layers)


def layers_beside(num_hidden_layers: int, stages: Any, stage: Any, first: Any, last: Any, chunks: int = 1) -> Any:
    """Megatron-LM's rule where the layers of the first pipeline rank, or the last, are said (transformer_block.py:
    `get_num_layers_to_build`): the other ranks share the rest, and all stages of a rank have as many. What does not
    divide, which it refuses, goes to the first ranks.
    """
    pp = stages // chunks
    rank = stage % (pp + (pp < 1))
    others, rest = pp - (first > 0) - (last > 0), num_hidden_layers - first - last
    several = most(others, 1)
    share = rest // several + (rank - (first > 0) < rest % several)
    at_first, at_last = (rank == 0) * (first > 0), (rank == pp - 1) * (last > 0)
    here = at_first * first + at_last * last + (1 - at_first) * (1 - at_last) * share
    nth = stage // (pp + (pp < 1))  # of the rank's stages
    return where_pipelined(pp, here // chunks + (nth < here % chunks), num_hidden_layers)


def where_pipelined(pp: Any, uneven: Any, whole: int) -> Any:
    """`uneven` over stages, and all layers where there is but one."""
    return uneven * (pp > 1) + whole * (pp == 1)
