"""What is taken for granted of each source's runs: whose code ran, and what its rows do not say. One table, printed
beside every answer; no measured time or memory has a part in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from nanum import engines
from nanum.conventions import Conventions
from nanum.engines import megatron_kin as kin
from nanum.engines.engine import Engine
from nanum.engines.torchtitan_kin import LLM_FOUNDRY, ROWWISE, TENSORWISE, TORCHTITAN_2024
from nanum.job import Job, Precision
from nanum.layout import Dispatcher, Recompute, Structure
from nanum.model import Model
from nanum.validate.rows import Row

Family = Literal["gpt", "gpt without dropout", "bloom", "llama"]
"""What its rows leave out of a model: norms, positions, activation, biases, dropout, tied embeddings."""


@dataclass(frozen=True)
class Source:
    """`engine` is a name that `engines` knows, or one of Megatron's kin. Each entry of `assumed` is one sentence."""

    engine: str | Engine
    family: Family
    assumed: tuple[str, ...]
    precision: Precision = "bf16"  # where a row names none
    recompute: Recompute = "none"  # where a row names none
    zero: int = 0  # where a row names none
    attention: Literal["flash", "eager"] = "flash"
    network: str | None = None  # bandwidth between nodes of one GPU; None is the default link
    reached: float | None = None  # of that bandwidth, by one ring, where the source measured it; None is the default's
    vocab: int | None = None  # where a row names none
    virtual_stages: tuple[int, ...] = ()  # the first that divides a rank's layers, where a row names none
    reshard: bool | None = None  # None is the engine's own
    memory: Literal["allocated", "reserved"] | None = None  # what is measured, where a row says that it does not say
    sequence_parallel: bool = False  # where a row does not say
    dispatcher: Dispatcher = "alltoall"
    overlap: str = ""  # exchanges beside compute, where a row names none
    noisy: bool = False  # does it warn that its times are not to be trusted?
    public_models: bool = False  # are its models the published ones of their names, also in what a row leaves out?

    def loaded(self) -> Engine:
        """Raises Refused where the engine is not modelled."""
        return engines.load(self.engine) if isinstance(self.engine, str) else self.engine

    @property
    def fully_shards(self) -> bool:
        return "torchtitan" in (self.engine if isinstance(self.engine, str) else self.engine.name)

    @property
    def code(self) -> str:
        """Whose code, by name and version."""
        if isinstance(self.engine, str):
            return self.engine
        return f"{self.engine.name}: {self.engine.version}"


GPT = "GPT: LayerNorm with bias, learned positions, GELU, biases, dropout 0.1 (Megatron's default), tied embeddings"
NO_OVERLAP = "gradients are reduced after the last backward, and not beside it"
FP8 = "fp8 of any recipe is taken for one: linear layers of one byte an operand"
FP8_OF_TE = (
    "fp8 is MXFP8 where a row says so, and else has one scale for a tensor: linear layers of one byte an operand"
)
BLOCKS = ("MXFP8", "FP8-MX")
"""Precisions of rows whose scales are of blocks."""
LINK = "the link between nodes is not stated: the default of its chip"
OMNI_PATH = (
    "four Omni-Path links of 100 Gb/s a node (JeanZay): each GPU of a node is taken to send at once what all ranks of "
    "4 nodes together sent around one ring, 84.7 Gb/s on V100 and 40.5 on A100 (BigScience, experiments/bandwidth), as "
    "groups do that have one rank on each node"
)
NVIDIA_SMI = "memory is what nvidia-smi shows, in GiB"
CLOCK = "H100 with 96 GB of HBM2e at 2.4 TB/s and 500 W: its clock is taken to follow the cube root of its power"
DEEPSPEED_3D = "Megatron-DeepSpeed: no Transformer Engine; layers that do not divide go to the first stages"

_VTRAIN = Source(
    kin.MEGATRON_DEEPSPEED, "gpt", (GPT, NO_OVERLAP, "fp16, the code's own precision: rows name none", DEEPSPEED_3D),
    precision="fp16", recompute="full", attention="eager",
)  # fmt: skip
_VTRAIN_NODES = replace(_VTRAIN, network="100 Gb/s")  # 800 Gb/s a node
_BRIDGE = Source(
    kin.BRIDGE, "llama",
    (
        "what rows do not say is the recipes' of that version: recompute, dispatcher, overlaps, CUDA graphs, gradients",
        "sequence parallel wherever tp > 1; a version's kernels are not told apart (equal inputs differ to 1.77 times)",
        "layers that do not divide: embedding and head weigh a layer each",
        "fp8 attention and fused experts of 26.06 are not modelled",
        "Grace-Blackwell GPUs: one NVLink domain of up to 72, all used",
        "models are the published ones of their names: biases, sinks, norms of heads, groups of experts",
        FP8_OF_TE,
    ),
    public_models=True,
    zero=1,
    sequence_parallel=True,
    overlap="tp_comm_overlap",
)  # fmt: skip
_DGX_CLOUD = replace(
    _BRIDGE,
    assumed=(
        "NeMo 24.05 and 24.09, taken for Megatron-Bridge; the recipes' YAML files and the scripts that start them say "
        "recompute, overlaps, the attention library and in what gradients are reduced",
        LINK,
        *(line for line in _BRIDGE.assumed if line.startswith(("Grace-Blackwell", "models are", "sequence parallel"))),
        "fp8 has one scale for a tensor, and weights are gathered in it",
        "layers that do not divide: embedding and head weigh a layer each",
    ),
)
_SIMUMAX = Source(
    kin.SIMUMAX, "llama",
    ("memory is PyTorch's peak allocated on the worst rank", "gradients and weights do not travel beside the passes"),
    zero=1,
)  # fmt: skip
_TITAN = Source(
    TORCHTITAN_2024, "llama",
    (CLOCK, FP8, "memory is the peak that PyTorch reserved"),
    zero=3,
)  # fmt: skip
_TITAN_2025 = replace(
    _TITAN,
    engine=TENSORWISE,
    assumed=(
        "today's torchtitan, where it was 2025's; of then, repeated keys, and fp8 by tensors where rows say so",
        *_TITAN.assumed[:1],
    ),
)

SOURCES: dict[str, Source] = {
    "vtrain/single": _VTRAIN,
    "vtrain/multi": _VTRAIN_NODES,
    "vtrainlarge": _VTRAIN_NODES,
    "mbridge/dense": _BRIDGE,
    "mbridge/moe": replace(_BRIDGE, dispatcher="flex"),
    "dgxc/dense": _DGX_CLOUD,
    "dgxc/moe": replace(
        _DGX_CLOUD,
        assumed=(
            *_DGX_CLOUD.assumed,
            "Grok-1 with its tokenizer (Llama 3's), expert weights cut by tp; each expert's slots padded to capacity 1",
        ),
    ),
    "dgxc25": replace(
        _DGX_CLOUD,
        assumed=(
            "NeMo 25.04, taken for Megatron-Bridge, laid out by its scripts; nothing recomputed; gradients in bf16",
            "Nemotron on GB200 in CUDA graphs, as its script says; of Llama it says nothing: none",
            *_DGX_CLOUD.assumed[1:],
        ),
    ),
    "simumax/dense": _SIMUMAX,
    "simumax/moe": _SIMUMAX,
    "titan": _TITAN,
    "titan25": _TITAN_2025,
    "mpt": Source(
        LLM_FOUNDRY, "gpt without dropout",
        ("llm-foundry's FSDP1, taken for torchtitan's FSDP2, with FlashAttention 1 in Triton",
         "SHARD_GRAD_OP (ZeRO-2) is FSDP2 without resharding",
         "MPT: LayerNorm with bias, learned positions, GELU, biases, no dropout, tied embeddings",
         "precision mode PURE, which reduces in bf16, is taken for DEFAULT", FP8, LINK),
        zero=3, reshard=True,
    ),
    "sc21": Source(
        kin.SC21, "gpt",
        (GPT, "micro-batches and virtual stages of table 1 are its scripts'",
         "table 2's virtual stages are not stated: as many of three and two as a rank's layers divide into",
         "ZeRO-3 rows are DeepSpeed's of 2021, which is taken to gather weights when they are needed"),
        precision="fp16", recompute="full", attention="eager", network="200 Gb/s", virtual_stages=(3, 2),
    ),
    "bs176": Source(
        kin.MEGATRON_DEEPSPEED, "bloom",
        ("BLOOM: LayerNorm with bias also after the embedding, ALiBi, GELU, biases, tied embeddings, no dropout",
         DEEPSPEED_3D, OMNI_PATH, NVIDIA_SMI),
        precision="fp16", recompute="full", zero=1, attention="eager", network="50 Gb/s", reached=40.5 / 50,
    ),
    "jz": Source(
        kin.MEGATRON_DEEPSPEED, "gpt", (GPT, DEEPSPEED_3D, OMNI_PATH, NVIDIA_SMI, "the source warns of 40 % noise"),
        precision="fp16", recompute="full", attention="eager", network="100 Gb/s", reached=84.7 / 100, noisy=True,
    ),
    "zb": Source(
        kin.ZERO_BUBBLE, "gpt",
        (GPT, "recompute is not stated: none", LINK,
         "precision is not stated: fp16, and gradients too, as its script says (examples/pretrain_zero_bubble.sh)",
         "vocabulary is not stated: 32000, as the names of its models say (28.3B allows 26k to 42k, 50304 is 28.4B)",
         "embedding and head weigh a layer each, as layer counts of k·p - 2 say",
         "memory's kind is not stated: PyTorch's peak allocated, in GB"),
        precision="fp16", attention="eager", vocab=32000, memory="allocated",
    ),
    "nanotron": Source(
        "nanotron", "llama",
        ("recompute is not stated: none", LINK, "memory's kind is not stated: PyTorch's peak reserved, in GB"),
        zero=1, memory="reserved",
    ),
    "ds": Source("deepspeed", "gpt", (GPT,), precision="fp16", recompute="full", zero=3, attention="eager"),
}  # fmt: skip

OTHER_SHARDED = Source("torchtitan", "llama", ("a source that is not known: ZeRO-3 is torchtitan's, a Llama",), zero=3)
OTHER = Source("megatron", "llama", ("a source that is not known: megatron, a Llama, what a row leaves out none",))


def source_of(row: Row) -> Source:
    """The table's entry. DeepSpeed's ZeRO-3 beside Megatron's other layouts is an engine of its own, and so is a later
    version where a row names one.
    """
    zero = row["layout.zero_stage"]
    known = SOURCES.get(row.source, OTHER_SHARDED if zero == 3 else OTHER)
    if zero == 3 and row.source in ("sc21", "jz"):
        return replace(known, engine=kin.ZERO_3_OF_2021, zero=3)
    if row.source == "titan25" and "rowwise" in (row["precision"] or ""):
        known = replace(known, engine=ROWWISE)
    if known.engine is kin.BRIDGE:
        stated = {"graphs": row["cuda_graphs"] or "none", "grads": row["grad_reduce"] or ""}
        blocks = (row["precision"] or "") in BLOCKS
        known = replace(known, engine=kin.bridge(overlaps=row["overlap"] or "", blocks=blocks, **stated))
    if row["attention_library"]:
        known = replace(known, engine=_attending(known.loaded(), row["attention_library"]))
    return known


@cache
def _attending(engine: Engine, library: Literal["flash", "cudnn"]) -> Engine:
    """The same with flash attention of another library."""

    def conventions(model: Model, job: Job, structure: Structure) -> Conventions:
        return replace(engine.conventions(model, job, structure), attention_library=library)

    return replace(engine, conventions=conventions)
