"""The commands that ask of real runs: this machine's (`verify`, `measure`), and published ones (`validate`)."""

from __future__ import annotations

import gc
from typing import Annotated

import typer

from nanum.cli import flags
from nanum.cli.answers import BAD_NEWS, GOOD, ends, print_json, stdout_console, warn

FORGOTTEN = (
    "what steps said of it ([in_a_step]) is left out, since they were observed over what was known of its links "
    "before: observe them again"
)


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
    or not at all, without the comments of one that it replaces.
    """
    from nanum.cli.measuring import Words, question, say_lost_comments
    from nanum.cli.progress import Progress
    from nanum.measure import from_nccl_tests as read_logs
    from nanum.measure import save, summary, this_machine

    asked = question(Words(logs or (), output, device, chip, cluster, quick, from_nccl_tests, force))
    if asked.base is not None:
        found = read_logs(asked.logs, asked.base, asked.file.stem, sized=asked.sized)
        if asked.base.in_a_step is not None:
            warn(asked.base, [FORGOTTEN])
    else:
        with Progress("measuring") as progress:
            found = this_machine(asked.file.stem, progress, device=device, quick=quick)
    if save(found, asked.file, force=force):
        say_lost_comments(asked.file)
    document = {"file": str(asked.file), **summary(found)}
    if json:
        print_json(document)
    else:
        from nanum.report.measured import print_measured

        print_measured(document, stdout_console())
    return GOOD


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

    Each line of FILE is a run, with the fields of the rows that are shipped (nanum/data/measured/published.jsonl) and
    no others. A run of the shipped ones' ids and layouts is completed by what these say of its recipe. A row that
    cannot be run, or does not say enough, is skipped and counted, with the reason. What a source measured has no part
    in what is predicted of it. Runs that differ in their layout alone say how well layouts are ranked. The shipped
    rows take about 50 seconds of one core.

    Exit code: 0 where a row was compared, 1 where none could be, 2 where the file cannot be read or has no row, or the
    plot not written.
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
