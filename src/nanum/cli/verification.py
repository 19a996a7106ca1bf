"""From the user's words to what `verify` runs. Every reason why it cannot be run is raised at once."""

from __future__ import annotations

import json as json_text
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanum.cli.answers import BAD_NEWS, GOOD, print_json
from nanum.cli.layout_words import layout_of
from nanum.cli.reader import Flags, Reader, flag, loaded, shown
from nanum.cli.words import trained
from nanum.errors import Refused
from nanum.job import Job

if TYPE_CHECKING:
    from rich.console import Console

    from nanum.engines.engine import Engine
    from nanum.layout import Layout
    from nanum.model import Model
    from nanum.verify import Case, Verification

DEFAULT_MODEL = "tiny-llama"
DEFAULT_SEQ_LEN = 64
DEFAULT_MICRO_BATCH_SIZE = 2
LARGEST_ANSWER_BYTES = 64 * 2**20
TRAINED = ("adamw", "sgd")
"""Optimizers that a real run has."""


@dataclass(frozen=True)
class Asked:
    case: Case
    defaults: tuple[str, ...]


def verify_case(model_word: str | None, flags: Flags) -> Asked:
    """One case. Raises Refused with every reason, those of the rules and of the engine among them."""
    from nanum.engines.torch import on_gloo
    from nanum.model import load as load_model
    from nanum.model.scale import scaled
    from nanum.verify import STEPS, Case
    from nanum.verify.case import not_run

    reader = Reader(flags)
    engine = on_gloo()
    if (said := reader.word("engine")) not in (None, engine.name):
        reader.reasons.append(f"--engine {shown(said)}: what is run is PyTorch itself, engine torch")
    if model_word is None:
        reader.defaults.append(f"model {DEFAULT_MODEL}")
    model = loaded(load_model, model_word or DEFAULT_MODEL, reader)
    sizes = {name: reader.whole(name, 0) or None for name in ("layers", "hidden", "vocab")}
    if model is not None:
        try:
            model = scaled(model, **sizes)
        except Refused as refused:
            reader.reasons.extend(refused.reasons)
    ranks = _ranks(reader)
    for name, value in (("micro_batch_size", DEFAULT_MICRO_BATCH_SIZE), ("steps", STEPS)):
        if not reader.said(name):
            reader.defaults.append(f"{name} {value}")
    layout = layout_of(reader, engine, ranks, micro_batch_size=DEFAULT_MICRO_BATCH_SIZE, of="ranks")
    sync: Any = reader.choice("grad_sync", "each")
    layout = replace(layout, structure=replace(layout.structure, grad_sync=sync))
    job = _job(reader, model, layout)
    steps = reader.whole("steps", STEPS)
    if steps < STEPS:
        reader.reasons.append(
            f"--steps {steps}: at least {STEPS}, of which the third is counted and the fourth watched"
        )
    cap = _megabytes(reader)
    if reader.unread or reader.none_left or model is None or ranks is None:
        raise Refused(reader.reasons)
    reader.reasons += [
        *broken_rules(model, job, layout, engine, ranks),
        *_not_run(reader, job, layout),
        *not_run(model, job, layout),
    ]
    if model.vocab_size < 2 and (model.patches is None or model.vocab_size):
        reader.reasons.append(f"--vocab {model.vocab_size}: with one token there is no loss")
    if reader.reasons:
        raise Refused(reader.reasons)
    return Asked(Case(model.name, model, job, layout, steps, cap), tuple(reader.defaults))


def broken_rules(model: Model, job: Job, layout: Layout, engine: Engine, ranks: int) -> list[str]:
    """Why these ranks cannot run it, whatever they run on."""
    from nanum.cluster import load as load_cluster
    from nanum.rules import GENERAL, broken

    these = replace(
        load_cluster("1x1xh100-sxm"), name=f"{ranks} ranks", gpus_per_node=ranks
    )  # only their number counts
    return broken((*GENERAL, *engine.refuses), model, job, these, layout)


def _ranks(reader: Reader) -> int | None:
    if not reader.said("ranks"):
        reader.reasons.append("--ranks N is missing: how many ranks train")
        return None
    ranks = reader.whole("ranks", 1)
    if ranks < 1:
        reader.reasons.append(f"--ranks {ranks}: must be at least 1")
        return None
    return ranks


def _job(reader: Reader, model: Model | None, layout: Layout) -> Job:
    longest = model.max_position_embeddings if model is not None else DEFAULT_SEQ_LEN
    fixed = model is not None and model.patches is not None  # a picture is as long as it is
    seq_len = reader.whole("seq_len", longest if fixed else min(DEFAULT_SEQ_LEN, longest))
    data_ranks = max(1, layout.data_ranks)
    m = max(1, 2 * layout.pp * layout.structure.virtual_stages) if layout.structure.pipelined else 1
    batch = reader.whole("global_batch_size", max(1, layout.micro_batch_size) * data_ranks * m)
    for name, value in (("seq_len", seq_len), ("global_batch_size", batch)):
        if not reader.said(name):
            reader.defaults.append(f"{name} {value}")
    chosen: dict[str, Any] = {}
    for name, default in (("precision", "fp32"), ("optimizer", "adamw")):
        chosen[name] = reader.choice(name, default)
        if not reader.said(name):
            reader.defaults.append(f"{name} {default}")
    if chosen["optimizer"] not in TRAINED:
        reader.reasons.append(f"--optimizer {chosen['optimizer']}: a real run has {' or '.join(TRAINED)}")
    return Job(seq_len, batch, **chosen, trained=trained(reader))


def _megabytes(reader: Reader) -> float | None:
    word = reader.word("bucket_cap_mb")
    if word is None:
        return None
    try:
        size = float(word)
    except ValueError:
        size = -1.0
    if not 0 < size < 1e6:
        reader.reasons.append(f"--bucket-cap-mb {shown(word)}: must be a number of MiB above 0")
        reader.unread = True
        return None
    return size


def _not_run(reader: Reader, job: Job, layout: Layout) -> list[str]:
    """What is modelled, and is not run here; and what would be said in vain."""
    found = []
    if reader.word("bucket_cap_mb") and (layout.structure.zero == 3 or layout.data_ranks == 1):
        found.append("--bucket-cap-mb is DDP's, and this layout has none: --zero 0 or 1 over several data ranks")
    if layout.structure.zero == 3 and layout.dp_shard * layout.cp == 1:
        found.append("--zero 3 with one rank of dp_shard and cp: FSDP2 has nothing to shard, and is not run: --zero 0")
    if job.trained.quantize != "none":
        found.append(f"--quantize {job.trained.quantize} is predicted, and not run here")
    if job.precision == "fp16":
        found.append("--precision fp16 is not run here: fp32 or bf16")
    if reader.word("attention") == "eager":
        found.append("--attention eager is not run here: flash")
    if (offload := reader.word("offload") or "none") != "none":
        found.append(f"--offload {offload} is not run here: where the device is the host, nothing moves")
    if (loss := reader.word("loss")) in ("chunked", "fused"):
        found.append(f"--loss {loss} is not run here: full")
    if reader.word("rank_order") is not None:
        found.append("--rank-order is not run here: it moves ranks between links, and there is one")
    return found


def too_large(case: Case, free_bytes: int) -> str | None:
    """Why a case does not fit this machine's memory, where it does not: all ranks at their fullest stage's peak or,
    before that, a whole model on the first rank of each stage, which it is compared with.
    """
    from nanum.engines.torch import on_gloo
    from nanum.layout import Layout, Structure
    from nanum.units import GIB
    from nanum.verify.expected import expected

    engine, layout, first = on_gloo(), case.layout, case.layout.place(0)

    def peak(at: Layout, stage: int) -> int:
        return expected(case.model, case.job, at, engine, {**first, "pp": stage}).memory["allocated_peak"]

    alone = Layout(micro_batch_size=layout.micro_batch_size, structure=Structure(zero=0))
    need = max(case.ranks * max(peak(layout, stage) for stage in range(layout.pp)), layout.pp * peak(alone, 0))
    if need <= free_bytes:
        return None
    return (
        f"{case.ranks} ranks of {case.model.name} would hold {need / GIB:.1f} GiB, and {free_bytes / GIB:.1f} GiB are "
        "free here: scale it down with --layers, --hidden and --vocab"
    )


def mesh_words(case: Case) -> str:
    """`dp_shard 2 · tp 2`, as a person reads a layout."""
    sizes = case.layout.sizes | ({"ep": case.layout.ep} if case.layout.structure.own_experts else {})
    parts = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    return " · ".join(parts) if parts else "nothing divided"


@dataclass(frozen=True)
class Switches:
    """What the command does, besides one case."""

    all: bool
    quick: bool
    print_launch: bool
    answer: str | None
    json: bool


def run(model_word: str | None, flags: Flags, switches: Switches, console: Console) -> int:
    """The `verify` command: its exit code."""
    if switches.all:
        return _run_all(model_word, flags, switches, console)
    reasons = ["--quick is for --all"] if switches.quick else []
    if switches.print_launch and (switches.answer or switches.json):
        reasons.append("--print-launch only prints a command: without --answer and --json")
    try:
        asked = verify_case(model_word, flags)
    except Refused as refused:
        raise Refused([*reasons, *refused.reasons]) from None
    if reasons:
        raise Refused(reasons)
    if switches.print_launch:
        print(launch_command(asked.case))
        return GOOD
    found = _answered(asked.case, Path(switches.answer)) if switches.answer else _verified([asked.case])[0]
    document = found.to_dict()
    if switches.json:
        print_json(document)
    else:
        from nanum.report.verification import print_verification

        print_verification(document, console, mesh_words(asked.case), asked.defaults)
    return GOOD if found.ok else BAD_NEWS


def _run_all(model_word: str | None, flags: Flags, switches: Switches, console: Console) -> int:
    from nanum.verify.matrix import cases

    silent = {"all", "quick", "json", "model"} | ({"print_launch"} if not switches.print_launch else set())
    said = [flag(name, value) for name, value in flags.items() if name not in silent and value is not None]
    if model_word is not None or said:
        names = [*(["MODEL"] if model_word is not None else []), *said]
        raise Refused(f"--all runs a matrix of its own, and takes no {', '.join(names)}")
    begin = time.monotonic()
    found = _verified(cases(quick=switches.quick))
    document = {
        "ok": all(each.ok for each in found),
        "seconds": time.monotonic() - begin,
        "cases": [each.to_dict() for each in found],
    }
    if switches.json:
        print_json(document)
    else:
        from nanum.report.verification import print_matrix

        print_matrix(document, console)
    return GOOD if document["ok"] else BAD_NEWS


def _verified(cases: Sequence[Case]) -> list[Verification]:
    from nanum.cli.progress import Progress
    from nanum.verify import verify

    if reasons := [reason for case in cases if (reason := too_large(case, _free_bytes()))]:
        raise Refused(reasons)
    with Progress("ranks train") as progress:
        return verify(cases, progress)


def _free_bytes() -> int:
    """Memory that this machine could still give, or all there could be where it does not tell."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return sys.maxsize


def launch_command(case: Case) -> str:
    """The same run by torchrun, on as many machines as one likes."""
    from nanum.verify import questions

    question = shlex.quote(json_text.dumps(questions([case]), separators=(",", ":")))
    return (
        "# On several machines: --nnodes, --nproc-per-node and --rdzv-endpoint by their number and address, on each.\n"
        "# `nanum verify` with the same flags and --answer answer.json then compares.\n"
        f"torchrun --nnodes 1 --nproc-per-node {case.ranks} --rdzv-backend c10d --rdzv-endpoint localhost:29400 "
        f"-m nanum.live.worker --question {question} --answer answer.json"
    )


def _answered(case: Case, path: Path) -> Verification:
    from nanum import files
    from nanum.verify import answered, questions

    raw = files.read(path, "the answer of a launch", LARGEST_ANSWER_BYTES)
    try:
        (answer,) = json_text.loads(raw)["answers"]
        (question,) = json_text.loads(json_text.dumps(questions([case])))["questions"]
        if answer["question"] != question:
            raise Refused(f"{path}: answers another question than these flags ask")
        found = answered(case, answer)
        found.to_dict()  # all of it can be read
    except Refused:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise Refused(f"{path}: not what `python -m nanum.live.worker` writes") from None
    return found
