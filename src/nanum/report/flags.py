"""A document's question, as the flags of `predict` that ask it."""

from __future__ import annotations

from nanum.layout import AXES as RANK_ORDER
from nanum.report.of_experts import dispatch_flags, routing_flags
from nanum.report.tables import Document

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
PLACED = ("first_stage_layers", "last_stage_layers", "embedding_weight", "head_weight")


def flags_of(document: Document) -> str:
    """The flags of `predict` that ask for a document's layout."""
    at, job = document["layout"], document["job"]
    words = [f"--{a.replace('_', '-')} {at[a]}" for a in AXES if a == "dp_shard" or at[a] != 1]
    recompute = at.get("recompute_modules") or at["recompute"]
    words.append(f"--micro-batch-size {at['micro_batch_size']} --zero {at['zero']} --recompute {recompute}")
    if at.get("recompute_layers"):
        words.append(f"--recompute-layers {at['recompute_layers']}")
    words += [f"--recompute-{way} {n}" for way in ("every", "chunk") if (n := at.get(f"recompute_{way}", 1)) > 1]
    if at["zero"] == 3:
        words.append("--reshard" if at["reshard"] else "--no-reshard")
    if at["tp"] > 1:
        words.append("--sp" if at["sp"] else "--no-sp")
        words += ["--tp-overlap"] if at.get("tp_overlap") else []
    if at["cp"] > 1:
        words.append(f"--cp-kind {at['cp_kind']}")
    if at["pp"] > 1:
        words.append(f"--schedule {at['schedule']}")
        if at["virtual_stages"] > 1:
            words.append(f"--virtual-stages {at['virtual_stages']}")
        placed = ((name, at.get(name)) for name in PLACED)
        words += [f"--{name.replace('_', '-')} {n}" for name, n in placed if n is not None and says(name, n)]
    if at["ep"] > 1 or at["etp"] != at["tp"]:
        words.append(f"--etp {at['etp']}")
    words += [*dispatch_flags(at), *(["--hpz"] if at.get("hpz") else [])]
    if at["rank_order"] != ",".join(RANK_ORDER):
        words.append(f"--rank-order {at['rank_order']}")
    if at["attention"] != "flash":
        words.append(f"--attention {at['attention']}")
    if at.get("loss", "full") != "full":
        words.append(f"--loss {at['loss']}" + (f" --loss-chunks {at['loss_chunks']}" if at["loss_chunks"] > 1 else ""))
    if at.get("fp8_gather"):
        words.append("--fp8-gather")
    if at.get("offload", "none") != "none":
        words.append(f"--offload {at['offload']}")
        if at["offload_fraction"] != 1:
            words.append(f"--offload-fraction {at['offload_fraction']}")
    if at["compile"]:
        words.append("--compile")
    words.append(f"--engine {document['engine']['name']}")
    words.append(f"--seq-len {job['seq_len']} --global-batch-size {job['global_batch_size']}")
    if modules := document["model"].get("mtp_layers"):
        words.append(f"--mtp-layers {modules}")
    usual = {"precision": "bf16", "optimizer": "adamw", "expert_imbalance": 1.0}
    said = [(name.replace("_", "-"), job[name]) for name, word in usual.items() if job.get(name, word) != word]
    words += [f"--{name} {value}" for name, value in said]
    return " ".join([*words, *_trained_flags(job.get("trained", {})), *routing_flags(job.get("routing", {}))])


def _trained_flags(trained: Document) -> list[str]:
    """The flags of `predict` that say what is trained, where it is not all of the model."""
    if not trained:
        return []
    rank = trained["lora_rank"]
    usual = {"lora_rank": 0, "train": "none" if rank else "all", "lora_targets": "all", "quantize": "none"}
    said = {**trained, "train": trained["weights"]}
    return [f"--{name.replace('_', '-')} {said[name]}" for name, word in usual.items() if said[name] != word]


def says(name: str, number: int) -> bool:
    """Is it said of the ends of a pipeline? A weight of 0 is, 0 layers are not."""
    return number > 0 or name.endswith("weight")
