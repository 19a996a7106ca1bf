"""The layouts that `nanum verify --all` runs: every way that PyTorch has an engine for, alone and composed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from nanum.job import ALL, Job, Precision, Trained
from nanum.layout import Layout, Structure
from nanum.verify.case import Case
from nanum.verify.models import MODELS, SEQ_LEN

MICRO_BATCH_SIZE = 2


@dataclass(frozen=True)
class Ask:
    """A line of the matrix; what is not named is as it is by default."""

    name: str
    model: str = "llama"
    tied: bool | None = None
    layers: int = 2
    vocab: int | None = None
    precision: Precision = "fp32"
    micro_batches: int = 1
    bucket_cap_mb: float | None = None
    trained: Trained = ALL
    quick: bool = False  # among the dozen that are always run
    sizes: dict[str, Any] | None = None
    how: dict[str, Any] | None = None

    def case(self) -> Case:
        model = MODELS[self.model]
        if not model.encoder_layers:  # which has as many as it is told
            model = replace(model, num_hidden_layers=self.layers)
        if self.tied is not None:
            model = replace(model, tie_word_embeddings=self.tied)
        if self.vocab is not None:
            model = replace(model, vocab_size=self.vocab)
        sizes: dict[str, Any] = self.sizes or {}
        how = dict(self.how or {})
        tp, pp, cp = (sizes.get(axis, 1) for axis in ("tp", "pp", "cp"))
        how.setdefault("tensor", "none" if tp == 1 else "sequence")
        how.setdefault("cp_kind", "none" if cp == 1 else "ring")
        how["own_experts"] = sizes.get("ep", 1) > 1
        layout = Layout(**sizes, micro_batch_size=MICRO_BATCH_SIZE, structure=Structure(pipelined=pp > 1, **how))
        batch = MICRO_BATCH_SIZE * self.micro_batches * layout.data_ranks
        seq_len = model.patches.seq_len if model.patches else SEQ_LEN
        job = Job(seq_len, batch, self.precision, trained=self.trained)
        return Case(self.name, model, job, layout, bucket_cap_mb=self.bucket_cap_mb)


def _ask(name: str, *, how: dict[str, Any] | None = None, **named: Any) -> Ask:
    axes = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
    sizes = {axis: named.pop(axis) for axis in axes if axis in named}
    fields = {field: named.pop(field) for field in tuple(named) if field in Ask.__dataclass_fields__}
    structure = {"zero": 0, **(how or {}), **named}
    return Ask(name, sizes=sizes, how=structure, **fields)


_FULLY: dict[str, Any] = {"zero": 3}
_DDP: dict[str, Any] = {"bucket_cap_mb": 0.25}
_PIPELINE: dict[str, Any] = {"layers": 4, "micro_batches": 4, "pp": 2}
_FOUR = _PIPELINE | {"layers": 6, "pp": 4}
_MIXTURE: dict[str, Any] = {"model": "mixture"}
_LORA = Trained("none", lora_rank=4)
_OF_ATTENTION, _AND_ENDS = replace(_LORA, lora_targets="attention"), replace(_LORA, weights="ends")
_CHUNKS: dict[str, Any] = {"layers": 6, "micro_batches": 4, "pp": 2, "virtual_stages": 2}

MATRIX = (
    _ask("one rank", quick=True),
    _ask("one rank, gpt, bf16", model="gpt", precision="bf16"),
    _ask("one rank, accumulating", micro_batches=3),
    _ask("one rank, recompute full", recompute="full"),
    # data parallel
    _ask("ddp 2", dp_replicate=2, quick=True, **_DDP),
    _ask("ddp 2, PyTorch's buckets, tied", dp_replicate=2, tied=True),
    _ask("ddp 4, gpt, bf16", dp_replicate=4, model="gpt", precision="bf16", **_DDP),
    _ask("ddp 3, uneven", dp_replicate=3, model="uneven", **_DDP),
    _ask("ddp 2, accumulating", dp_replicate=2, micro_batches=3, **_DDP),
    _ask("ddp 2, accumulating without sync", dp_replicate=2, micro_batches=3, grad_sync="last", **_DDP),
    _ask("ddp 8", dp_replicate=8, **_DDP),
    _ask("zero-1 2", dp_shard=2, zero=1, quick=True, **_DDP),
    _ask("zero-1 4, gpt", dp_shard=4, zero=1, model="gpt", **_DDP),
    _ask("zero-1 3, uneven", dp_shard=3, zero=1, model="uneven", **_DDP),
    # sharded
    _ask("fsdp 2", dp_shard=2, quick=True, **_FULLY),
    _ask("fsdp 2, bf16", dp_shard=2, precision="bf16", **_FULLY),
    _ask("fsdp 4, gpt", dp_shard=4, model="gpt", **_FULLY),
    _ask("fsdp 4, tied, no reshard", dp_shard=4, tied=True, reshard=False, **_FULLY),
    _ask("fsdp 3, uneven", dp_shard=3, model="uneven", quick=True, **_FULLY),
    _ask("fsdp 3, uneven, bf16", dp_shard=3, model="uneven", precision="bf16", **_FULLY),
    _ask("fsdp 8", dp_shard=8, **_FULLY),
    _ask("fsdp 2, accumulating", dp_shard=2, micro_batches=3, **_FULLY),
    _ask("fsdp 2, accumulating without sync", dp_shard=2, micro_batches=3, grad_sync="last", **_FULLY),
    _ask("fsdp 2, recompute full", dp_shard=2, recompute="full", **_FULLY),
    _ask("fsdp 2, recompute selective", dp_shard=2, recompute="selective", **_FULLY),
    _ask("hsdp 2 x 2", dp_replicate=2, dp_shard=2, quick=True, **_FULLY),
    _ask("hsdp 2 x 2, accumulating, bf16", dp_replicate=2, dp_shard=2, micro_batches=2, precision="bf16", **_FULLY),
    _ask("one rank, recompute 2 layers at once", layers=5, recompute="full", recompute_chunk=2),
    _ask("one rank, recompute each 2nd layer", layers=5, recompute="full", recompute_every=2),
    _ask("fsdp 2, recompute each 2nd layer", layers=4, dp_shard=2, recompute="full", recompute_every=2, **_FULLY),
    _ask("ddp 2, recompute 3 layers at once, bf16", layers=4, dp_replicate=2, precision="bf16", recompute="full",
         recompute_chunk=3, **_DDP),
    # tensor and sequence parallel
    _ask("tp 2", tp=2, tensor="tensor"),
    _ask("tp 2, sequence parallel", tp=2, quick=True),
    _ask("tp 4, sequence parallel, bf16", tp=4, precision="bf16"),
    _ask("tp 4, gpt, sequence parallel", tp=4, model="gpt"),
    _ask("tp 2, gpt, tied, bf16", tp=2, model="gpt", tensor="tensor", precision="bf16"),
    _ask("ddp 2 x tp 2, gpt, tied, bf16", dp_replicate=2, tp=2, model="gpt", precision="bf16", **_DDP),
    _ask("tp 2, uneven vocabulary", tp=2, vocab=1001),
    _ask("tp 2, sequence parallel, recompute full", tp=2, recompute="full"),
    _ask("tp 2, sequence parallel, recompute selective", tp=2, recompute="selective"),
    # context parallel
    _ask("cp 2, ring", cp=2, cp_kind="ring", quick=True, **_FULLY),
    _ask("cp 4, ulysses", cp=4, cp_kind="ulysses", **_FULLY),
    _ask("cp 2, gathered keys", cp=2, cp_kind="allgather", **_FULLY),
    # pipelines
    _ask("pp 2, gpipe", schedule="gpipe", **_PIPELINE),
    _ask("pp 2, 1f1b", schedule="1f1b", quick=True, **_PIPELINE),
    _ask("pp 4, 1f1b, gpt, bf16", schedule="1f1b", precision="bf16", model="gpt", tied=False, **_FOUR),
    _ask("pp 2, 1f1b, recompute full", schedule="1f1b", recompute="full", **_PIPELINE),
    _ask("pp 2, 1 layer on the first stage, recompute 2 at once", schedule="1f1b", first_stage_layers=1,
         recompute="full", recompute_chunk=2, **_PIPELINE),
    _ask("pp 2, recompute each 2nd layer, bf16", schedule="1f1b", precision="bf16", recompute="full",
         recompute_every=2, **_PIPELINE),
    _ask("pp 2, interleaved", schedule="interleaved", **_CHUNKS),
    _ask("pp 2, looped breadth-first", schedule="looped-bfs", **_CHUNKS),
    _ask("pp 2, zero bubble", schedule="zb-h1", **_CHUNKS),
    _ask("pp 2, zero bubble V", schedule="zbv", quick=True, **_CHUNKS),
    _ask("pp 2, DualPipeV", schedule="dualpipev", **_CHUNKS),
    # experts and latent attention
    _ask("experts", layers=3, **_MIXTURE),
    _ask("experts, bf16", layers=3, precision="bf16", **_MIXTURE),
    _ask("experts, ddp 2", layers=3, dp_replicate=2, **_MIXTURE, **_DDP),
    _ask("experts, fsdp 2", layers=3, dp_shard=2, **_MIXTURE, **_FULLY),
    _ask("experts, ep 2", layers=3, dp_shard=2, ep=2, **_MIXTURE, **_FULLY),
    _ask("experts, ep 2 of fsdp 4", layers=3, dp_shard=4, ep=2, quick=True, **_MIXTURE, **_FULLY),
    _ask("experts, ep 2 of fsdp 4, bf16", layers=3, dp_shard=4, ep=2, precision="bf16", **_MIXTURE, **_FULLY),
    _ask("experts, hsdp 2 x 2, ep 2", layers=3, dp_replicate=2, dp_shard=2, ep=2, **_MIXTURE, **_FULLY),
    _ask("experts, ep 2 of fsdp 2 x pp 2", dp_shard=2, ep=2, reshard=False, **_MIXTURE, **_FULLY, **_PIPELINE),
    _ask("latent attention", model="latent"),
    _ask("latent attention, fsdp 2, bf16", model="latent", dp_shard=2, precision="bf16", **_FULLY),
    _ask("latent attention, pp 2", model="latent", schedule="1f1b", **_PIPELINE),
    # layers of other frames
    _ask("norms around blocks, bf16", model="sandwich", precision="bf16"),
    _ask("norms around blocks, tp 2", model="sandwich", tp=2),
    _ask("norms around blocks, fsdp 2 x tp 2", model="sandwich", dp_shard=2, tp=2, **_FULLY),
    _ask("norms around blocks, pp 2", model="sandwich", tied=False, schedule="1f1b", **_PIPELINE),
    _ask("norms after blocks, fsdp 2, recompute full", model="after", dp_shard=2, recompute="full", **_FULLY),
    _ask("blocks side by side, tp 2", model="parallel", tp=2),
    _ask("blocks side by side, tp 2, recompute full", model="parallel", tp=2, tensor="tensor", recompute="full"),
    _ask("blocks side by side, fsdp 2, bf16", model="parallel two", dp_shard=2, precision="bf16", **_FULLY),
    _ask("a narrow table, ddp 2", model="narrow", dp_replicate=2, **_DDP),
    _ask("a narrow table, fsdp 2, bf16", model="narrow", dp_shard=2, precision="bf16", **_FULLY),
    _ask("bare norms and gates, tp 2", model="bare", tp=2),
    _ask("an encoder, bf16", model="encoder", precision="bf16"),
    _ask("an encoder, ddp 2", model="encoder", dp_replicate=2, **_DDP),
    _ask("an encoder, fsdp 2", model="encoder", dp_shard=2, tied=False, **_FULLY),
    # pictures
    _ask("pictures", model="pictures"),
    _ask("pictures, bf16, recompute full", model="pictures", precision="bf16", recompute="full"),
    _ask("pictures without a classifier, ddp 2", model="pictures alone", dp_replicate=2, **_DDP),
    _ask("pictures, zero-1 2", model="pictures", dp_shard=2, zero=1, **_DDP),
    _ask("pictures, fsdp 2", model="pictures", dp_shard=2, **_FULLY),
    _ask("pictures, fsdp 3, bf16", model="pictures", dp_shard=3, precision="bf16", **_FULLY),
    _ask("pictures without a classifier, fsdp 2, bf16", model="pictures alone", dp_shard=2, precision="bf16", **_FULLY),
    _ask("pictures, tp 2", model="pictures", tp=2, tensor="tensor"),
    _ask("pictures, fsdp 2 x tp 2", model="pictures", dp_shard=2, tp=2, tensor="tensor", **_FULLY),
    _ask("pictures, pp 2", model="pictures", schedule="1f1b", **_PIPELINE),
    # an encoder and a decoder
    _ask("stacks", model="stacks"),
    _ask("stacks, tied, bf16", model="stacks, tied", precision="bf16"),
    _ask("stacks, tied, accumulating", model="stacks, tied", micro_batches=3),
    _ask("stacks, accumulating", model="stacks", micro_batches=3),
    _ask("stacks, recompute full", model="stacks", recompute="full"),
    _ask("stacks, recompute selective", model="stacks", recompute="selective"),
    _ask("stacks, ddp 2", model="stacks, tied", dp_replicate=2, **_DDP),
    _ask("stacks, zero-1 2", model="stacks", dp_shard=2, zero=1, **_DDP),
    _ask("stacks, fsdp 2", model="stacks", dp_shard=2, quick=True, **_FULLY),
    _ask("stacks, fsdp 2, tied, bf16", model="stacks, tied", dp_shard=2, precision="bf16", **_FULLY),
    _ask("stacks, fsdp 2, recompute full", model="stacks, tied", dp_shard=2, recompute="full", **_FULLY),
    _ask("stacks, tp 2", model="stacks", tp=2, tensor="tensor"),
    _ask("stacks, tp 2, sequence parallel", model="stacks, tied", tp=2),
    _ask("stacks, fsdp 2 x tp 2", model="stacks", dp_shard=2, tp=2, **_FULLY),
    # frozen weights, and adapters
    _ask("adapters", trained=_LORA),
    _ask("adapters, gpt, bf16, recompute full", model="gpt", precision="bf16", recompute="full", trained=_LORA),
    _ask("adapters in attention, ddp 2", dp_replicate=2, trained=_OF_ATTENTION, bucket_cap_mb=0.02),
    _ask("adapters, fsdp 2", dp_shard=2, trained=_LORA, **_FULLY),
    _ask("adapters, fsdp 2, bf16", dp_shard=2, precision="bf16", trained=_LORA, quick=True, **_FULLY),
    _ask("adapters and ends, fsdp 3, uneven", dp_shard=3, model="uneven", trained=_AND_ENDS, **_FULLY),
    _ask("adapters, pp 2", schedule="1f1b", trained=_LORA, **_PIPELINE),
    _ask("frozen ends, fsdp 2", dp_shard=2, trained=Trained("layers"), **_FULLY),
    # composed
    _ask("fsdp 2 x tp 2", dp_shard=2, tp=2, **_FULLY),
    _ask("fsdp 2 x tp 2, uneven vocabulary, bf16", dp_shard=2, tp=2, vocab=1001, precision="bf16", **_FULLY),
    _ask("hsdp 2 x 2 x tp 2", dp_replicate=2, dp_shard=2, tp=2, **_FULLY),
    _ask("fsdp 2 x cp 2, ulysses", dp_shard=2, cp=2, cp_kind="ulysses", **_FULLY),
    _ask("fsdp 2 x cp 2 x tp 2, ring", dp_shard=2, cp=2, tp=2, cp_kind="ring", **_FULLY),
    _ask("ddp 2 x tp 2", dp_replicate=2, tp=2, **_DDP),
    _ask("tp 2 x pp 2", tp=2, schedule="1f1b", **_PIPELINE),
    _ask("ddp 2 x pp 2", dp_replicate=2, schedule="1f1b", **_DDP, **_PIPELINE),
    _ask("ddp 2 x tp 2, accumulating", dp_replicate=2, tp=2, micro_batches=3, **_DDP),
    _ask("fsdp 2 x pp 2, no reshard", dp_shard=2, schedule="1f1b", reshard=False, **_FULLY, **_PIPELINE),
    _ask("fsdp 2 x tp 2 x pp 2, bf16", dp_shard=2, tp=2, reshard=False, precision="bf16", **_FULLY, **_PIPELINE),
    _ask("fsdp 2 x tp 2 x pp 2", dp_shard=2, tp=2, reshard=False, quick=True, **_FULLY, **_PIPELINE),
    _ask("fsdp 2 x pp 2, interleaved", dp_shard=2, schedule="interleaved", reshard=False, **_FULLY, **_CHUNKS),
    _ask("tp 2 x pp 2, interleaved", tp=2, schedule="interleaved", **_CHUNKS),
)  # fmt: skip


def cases(*, quick: bool = False) -> list[Case]:
    """All of them, or the dozen."""
    return [ask.case() for ask in MATRIX if ask.quick or not quick]
