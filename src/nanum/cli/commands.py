"""The commands. Each reads its words, asks one room below, and prints the answer; nothing is counted here."""

from __future__ import annotations

import gc
import shlex
from typing import Annotated, Any

import typer
import typer.core

from nanum.cli import flags, words
from nanum.cli.answers import BAD_NEWS, GOOD, ends, print_json, stdout_console
from nanum.cli.scaling import scale

typer.core.HAS_RICH = False  # or else it escapes brackets in plain help for HTML, and waits for rich to do so
EPILOG = "Example: nanum plan llama-3.1-70b 8x8xh100-sxm"

app = typer.Typer(
    name="nanum",
    help="This model, this job, this cluster: what should I divide, and what will have to be exchanged?",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"nanum {version('nanum')}")
        except PackageNotFoundError:
            print("nanum (run from its source, not installed)")
        raise typer.Exit


def _not_a_flag(word: str) -> str:
    """A model or cluster as it can be said again: a file's name that begins with a dash would be read as a flag."""
    return f"./{word}" if word.startswith("-") else word


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
@ends
@flags.taking(flags.OF_JOB)
def plan(
    ctx: typer.Context,
    model: flags.ModelWord,
    cluster: flags.ClusterWord,
    top: flags.Top = None,
    json: flags.AsJson = False,
    **said: Any,
) -> int:
    """Find the best layouts, ranked by step time.

    Every division of the whole cluster is tried, with every recompute mode and schedule, and micro-batches of 1 to 16;
    with flash attention, eager kernels and the default rank order. What is impossible or does not fit is counted, with
    the reason.

    \b
    Examples:
      nanum plan llama-3.1-70b 8x8xh100-sxm
      nanum plan llama-3.1-8b 1x8xa100-sxm-80gb --seq-len 4096 --top 3
      nanum plan ./my-model/config.json my-cluster.toml --engine megatron --json

    Exit code: 0 where a layout fits, 1 where none does, 2 where the question cannot be asked.
    """
    asked, shown = words.plan_question(model, cluster, ctx.params)

    from nanum.cli.progress import Progress
    from nanum.search import plan as search

    gc.disable()  # a plan makes some hundred thousand objects and hardly a cycle: looking for one costs 3 % of its time
    with Progress("layouts") as progress:
        found = search(asked.model, asked.job, asked.cluster, engine=asked.engine_name, top=shown, progress=progress)
    document: dict[str, Any] = found.to_dict(in_full=json)
    if json:
        print_json(document)
    else:
        from nanum.report.terminal import print_plan

        print_plan(document, stdout_console(), asked.defaults, asked=shlex.join(map(_not_a_flag, (model, cluster))))
    return GOOD if document["best"] else BAD_NEWS


@app.command()
@ends
@flags.taking(flags.OF_JOB, flags.OF_LAYOUT)
def predict(
    ctx: typer.Context,
    model: flags.ModelWord,
    cluster: flags.ClusterWord,
    json: flags.AsJson = False,
    **said: Any,
) -> int:
    """Predict one layout: memory, exchanges, time.

    \b
    Examples:
      nanum predict llama-3.1-8b 1x8xh100-sxm
      nanum predict llama-3.1-70b 8x8xh100-sxm --tp 8 --pp 4 --recompute full --engine megatron
      nanum predict gpt2 1x8xa100-sxm-40gb --dp-replicate 8 --dp-shard 1 --zero 0 --json

    dp_replicate · dp_shard · cp · tp · pp must equal the cluster's GPUs. Plain data parallel is --dp-replicate N
    --dp-shard 1.

    Exit code: 0 where it fits, 1 where it does not, 2 where the question cannot be asked.
    """
    asked, layout = words.question_and_layout(model, cluster, ctx.params)

    from nanum.prediction import predict as answer

    predicted = answer(asked.model, asked.job, asked.cluster, layout, engine=asked.engine.name)
    document: dict[str, Any] = predicted.to_dict()
    if not document["fits"]:
        from nanum.search import nearest

        near = nearest(predicted)
        document["nearest"] = None if near is None else near.to_dict(communication=False)
    if json:
        print_json(document)
    else:
        from nanum.report.terminal import print_prediction

        print_prediction(document, stdout_console(), asked.defaults)
    return GOOD if document["fits"] else BAD_NEWS


app.command()(scale)


@app.command()
@ends
def verify(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="As for predict, small or scaled down. [tiny-llama]", show_default=False
        ),
    ] = None,
    ranks: flags.Ranks = None,
    dp_replicate: flags.DpReplicate = None,
    dp_shard: flags.DpShard = None,
    tp: flags.Tp = None,
    sp: flags.Sp = None,
    cp: flags.Cp = None,
    cp_kind: flags.CpKind = None,
    pp: flags.Pp = None,
    schedule: flags.RunSchedule = None,
    virtual_stages: flags.VirtualStages = None,
    first_stage_layers: flags.FirstStageLayers = None,
    last_stage_layers: flags.LastStageLayers = None,
    embedding_weight: flags.EmbeddingWeight = None,
    head_weight: flags.HeadWeight = None,
    zero: flags.Zero = None,
    reshard: flags.Reshard = None,
    recompute: flags.Recompute = None,
    recompute_layers: flags.RecomputeLayers = None,
    recompute_every: flags.RecomputeEvery = None,
    recompute_chunk: flags.RecomputeChunk = None,
    grad_sync: flags.GradSyncFlag = None,
    bucket_cap_mb: flags.BucketCapMb = None,
    micro_batch_size: flags.SmallMicroBatchSize = None,
    seq_len: flags.SmallSeqLen = None,
    global_batch_size: flags.SmallGlobalBatchSize = None,
    precision: flags.RunPrecision = None,
    optimizer: flags.Optimizer = None,
    train: flags.Train = None,
    lora_rank: flags.LoraRank = None,
    lora_targets: flags.LoraTargets = None,
    quantize: flags.Quantize = None,
    layers: flags.Layers = None,
    hidden: flags.Hidden = None,
    vocab: flags.Vocab = None,
    steps: flags.Steps = None,
    attention: flags.Attention = None,
    rank_order: flags.RankOrder = None,
    ep: flags.Ep = None,
    etp: flags.Etp = None,
    loss: flags.Loss = None,
    offload: flags.Offload = None,
    compile: flags.Compile = None,
    engine: flags.TorchEngine = None,
    all: Annotated[bool, typer.Option("--all", help="Every layout of the matrix, instead of one: minutes.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="With --all: a dozen of them.")] = False,
    print_launch: Annotated[
        bool, typer.Option("--print-launch", help="Only print the command that runs it on several machines.")
    ] = False,
    answer: Annotated[
        str | None,
        typer.Option("--answer", metavar="FILE", help="Compare what such a launch wrote.", show_default=False),
    ] = None,
    json: flags.AsJson = False,
) -> int:
    """Run a layout for real on a small model, and compare.

    \b
    Examples:
      nanum verify --ranks 2 --zero 3
      nanum verify tiny-gpt --ranks 4 --dp-replicate 2 --dp-shard 1 --tp 2 --precision bf16
      nanum verify llama-3.1-8b --layers 4 --hidden 128 --vocab 1000 --ranks 2 --pp 2 --schedule gpipe
      nanum verify --all

    PyTorch's own engines train it. Loss and gradients are compared with one process's, exchanges row by row and byte by
    byte with those predicted, bytes held with what PyTorch allocated, and bytes sent with what came through the
    sockets. It needs the torch extra.

    Exit code: 0 where all is equal, 1 where something differs or a rank failed, 2 where the question cannot be asked.
    """
    from nanum.cli.verification import Switches, run

    return run(model, ctx.params, Switches(all, quick, print_launch, answer, json), stdout_console())


@app.command()
@ends
def measure(
    logs: Annotated[
        list[str] | None, typer.Argument(metavar="[LOG]...", help="With --from-nccl-tests.", show_default=False)
    ] = None,
    output: flags.Output = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer sizes and repeats: under a minute on two cores.")
    ] = False,
    device: Annotated[str, typer.Option(metavar="auto|cuda|cpu", help="What to measure.")] = "auto",
    from_nccl_tests: Annotated[
        bool, typer.Option("--from-nccl-tests", help="Measure nothing: read exchanges from logs of nccl-tests.")
    ] = False,
    chip: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of the logs: the chip (`nanum clusters`).", show_default=False)
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="CLUSTER", help="Of the logs: all that they say nothing of.", show_default=False),
    ] = None,
    force: flags.Force = False,
    json: flags.AsJson = False,
) -> int:
    """Measure this machine, as a cluster file.

    Matmuls, memory-bound kernels, attention, the optimizer, and exchanges of 2 to all ranks: medians, and how far they
    spread. A rank is a GPU or, without one, a core with one thread. The file works wherever CLUSTER does. It takes some
    minutes, and the machine should have nothing else to do. Needs the torch extra.

    \b
    Examples:
      nanum measure -o here.toml
      nanum measure -o here.toml --quick --force
      nanum predict my-model/config.json here.toml --engine torch --precision fp32
      nanum measure --from-nccl-tests all_reduce_perf.log all_gather_perf.log --chip h100-sxm -o lab.toml
      nanum measure --from-nccl-tests alltoall_perf.log --cluster lab.toml -o lab.toml --force

    Logs are those of all_reduce_perf, all_gather_perf, reduce_scatter_perf, alltoall_perf, sendrecv_perf and
    broadcast_perf. With --chip the nodes and GPUs are the largest log's.

    Exit code: 0 where it was measured, 1 where measuring failed, 2 where it cannot be asked; the file is written whole
    or not at all.
    """
    from nanum.cli.measuring import Words, question
    from nanum.cli.progress import Progress
    from nanum.measure import from_nccl_tests as read_logs
    from nanum.measure import save, summary, this_machine

    asked = question(Words(logs or (), output, device, chip, cluster, quick, from_nccl_tests, force))
    if asked.base is not None:
        found = read_logs(asked.logs, asked.base, asked.file.stem, sized=asked.sized)
    else:
        with Progress("measuring") as progress:
            found = this_machine(asked.file.stem, progress, device=device, quick=quick)
    save(found, asked.file, force=force)
    document = {"file": str(asked.file), **summary(found)}
    if json:
        print_json(document)
    else:
        from nanum.report.measured import print_measured

        print_measured(document, stdout_console())
    return GOOD


@app.command()
@ends
def validate(
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE.jsonl]", help="Runs of your own. [those shipped]", show_default=False)
    ] = None,
    rows: Annotated[
        bool, typer.Option("--rows", help="List every row, worst first, each with the likely cause.")
    ] = False,
    plot: Annotated[
        str | None,
        typer.Option(
            "--plot",
            metavar="FILE.svg|FILE.png",
            help="Draw predicted against measured. Needs the plot extra.",
            show_default=False,
        ),
    ] = None,
    force: flags.Force = False,
    jobs: Annotated[
        str | None,
        typer.Option(
            "--jobs", metavar="N", help="Processes to work in, at most the cores. [as many]", show_default=False
        ),
    ] = None,
    json: flags.AsJson = False,
) -> int:
    """Published runs beside their predictions, by source.

    \b
    Examples:
      nanum validate
      nanum validate --rows
      nanum validate --plot errors.svg
      nanum validate my-runs.jsonl --json

    Each line of FILE is a run, with the fields of the rows that are shipped (nanum/data/measured/published.jsonl). A
    row that cannot be run, or does not say enough, is skipped and counted, with the reason. What a source measured has
    no part in what is predicted of it. Runs that differ in their layout alone say how well layouts are ranked. The
    shipped rows take about 40 seconds of one core.

    Exit code: 0 where a row was compared, 1 where none could be, 2 where the file cannot be read or the plot not
    written.
    """
    from nanum.cli.progress import Progress
    from nanum.cli.validating import Words, draw, question
    from nanum.validate import validate as compare

    asked = question(Words(file, plot, force, jobs))
    gc.disable()  # as in plan
    with Progress("runs") as progress:
        document = compare(asked.rows, progress, asked.jobs)
    draw(document, asked)
    if json:
        print_json(document)
    else:
        from nanum.report.validation import print_validation

        print_validation(document, stdout_console(), rows=rows)
    return GOOD if document["rows"] else BAD_NEWS


@app.command()
@ends
def lesson(
    parts: Annotated[
        list[str] | None, typer.Argument(metavar="[A] [B] [C] [D] [E]", help="Which parts. [all]", show_default=False)
    ] = None,
    lang: Annotated[str, typer.Option(metavar="en|ko", help="Its language.")] = "en",
    json: flags.AsJson = False,
) -> int:
    """Why dividing leaves communication, in numbers.

    \b
    Examples:
      nanum lesson
      nanum lesson A --lang ko
      nanum lesson D E --json

    A is arithmetic and prediction. B and C measure one process of this machine; D and E run data, tensor and pipeline
    parallelism on several. B to E need the torch extra; all of it takes some two minutes.

    Exit code: 0, or 1 where what E runs differs from what was predicted, or a run failed.
    """
    from nanum.lesson import run

    return run(parts or (), lang, json, stdout_console())


@app.command()
@ends
def models(json: flags.AsJson = False) -> int:
    """List the model presets.

    \b
    Examples:
      nanum models
      nanum models --json
    """
    from nanum.cli.listings import models_document

    document = models_document()
    if json:
        print_json(document)
    else:
        from nanum.report.listings import print_models

        print_models(document, stdout_console())
    return GOOD


@app.command()
@ends
def clusters(json: flags.AsJson = False) -> int:
    """List the cluster presets and the chips.

    \b
    Examples:
      nanum clusters
      nanum clusters --json

    A cluster may also be a TOML file. Three keys suffice; every other is the chip's or the default's:

    \b
      nodes = 8
      gpus_per_node = 8
      chip = "h100-sxm"
      [inter_node]                # or intra_node
      bandwidth = "200 Gb/s"      # one direction, of one GPU
      efficiency = { value = 0.8, tag = "measured", source = "nccl-tests" }
      latency = "20 us"           # of one hop
      group_size = 64             # ranks at which the efficiency was measured
    """
    from nanum.cli.listings import clusters_document

    document = clusters_document()
    if json:
        print_json(document)
    else:
        from nanum.report.listings import print_clusters

        print_clusters(document, stdout_console())
    return GOOD
