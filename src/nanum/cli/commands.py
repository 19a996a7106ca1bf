"""The commands. Each reads its words, asks one room below, and prints the answer; nothing is counted here."""

from __future__ import annotations

import gc
import shlex
from typing import Annotated, Any

import typer
import typer.core

from nanum.cli import flags, words
from nanum.cli.answers import BAD_NEWS, GOOD, ends, print_json, stdout_console, warn
from nanum.cli.real_runs import measure, validate, verify
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
@flags.taking(flags.OF_JOB, flags.OF_PLAN)
def plan(
    ctx: typer.Context,
    model: flags.ModelWord,
    cluster: flags.ClusterWord,
    top: flags.Top = None,
    ties: flags.Ties = False,
    json: flags.AsJson = False,
    **said: Any,
) -> int:
    """Find the best layouts, ranked by step time.

    Every division of the whole cluster is tried, with every recompute mode, micro-batches of 1 to 16, 1F1B and GPipe,
    and the most promising pipelines with several stages a rank (interleaved); sequences are divided into parts of 4096
    tokens or more. With flash attention and the default rank order. What is impossible or does not fit is counted, with
    the reason. What differs from a faster layout only in how data-parallel ranks are split, in what ZeRO shards, or the
    like, and is a near tie of it, stands in its row; --ties gives it a row of its own. How tokens come to experts is
    not searched, nor how kernels are made: --dispatcher, --tp-overlap and --compile say it for all layouts.

    \b
    Examples:
      nanum plan llama-3.1-70b 8x8xh100-sxm
      nanum plan llama-3.1-8b 1x8xa100-sxm-80gb --seq-len 4096 --top 3
      nanum plan deepseek-v3 64x8xh100-sxm --engine megatron --precision fp8 --dispatcher flex
      nanum plan ./my-model/config.json my-cluster.toml --engine megatron --json

    Exit code: 0 where a layout fits, 1 where none does, 2 where the question cannot be asked.
    """
    asked, shown, like = words.plan_question(model, cluster, ctx.params)
    warn(asked.cluster)

    from nanum.cli.progress import Progress
    from nanum.search import plan as search

    gc.disable()  # a plan makes some hundred thousand objects and hardly a cycle: looking for one costs 3 % of its time
    with Progress("layouts") as progress:
        found = search(
            asked.model, asked.job, asked.cluster, asked.engine_name, shown, progress, fold=not ties, like=like
        )
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
    observed: flags.Observed = None,
    output: flags.ObservedOutput = None,
    force: flags.Force = False,
    json: flags.AsJson = False,
    **said: Any,
) -> int:
    """Predict one layout: memory, exchanges, time.

    \b
    Examples:
      nanum predict llama-3.1-8b 1x8xh100-sxm
      nanum predict llama-3.1-70b 8x8xh100-sxm --tp 8 --pp 4 --recompute full --engine megatron
      nanum predict gpt2 1x8xa100-sxm-40gb --dp-replicate 8 --dp-shard 1 --zero 0 --json
      nanum predict llama-3.1-8b 1x8xh100-sxm --observed 71s -o lab.toml
      nanum predict llama-3.1-8b lab.toml --tp 2 --observed 80s -o lab.toml --force

    With --observed the machine's coefficients become those that are most likely, given what that step took: what moved
    is said, and which layouts are now best. -o writes that machine, and plan, scale and predict take it as CLUSTER; a
    file's comments are not kept where that replaces it.

    dp_replicate · dp_shard · cp · tp · pp must equal the cluster's GPUs. Plain data parallel is --dp-replicate N
    --dp-shard 1.

    Exit code: 0 where it fits, 1 where it does not, 2 where the question cannot be asked.
    """
    from nanum.cli.calibrating import answer as calibrated
    from nanum.cli.calibrating import question

    asked, layout, seen = question(model, cluster, ctx.params)
    warn(asked.cluster)

    from nanum.prediction import predict as answer

    predicted = answer(asked.model, asked.job, asked.cluster, layout, engine=asked.engine.name)
    document: dict[str, Any]
    if seen is None:
        document = predicted.to_dict()
    else:
        predicted, document = calibrated(predicted, seen)
    if not document["fits"]:
        from nanum.cli.progress import Progress
        from nanum.search import levers, nearest

        with Progress("layouts, for the nearest that fits") as progress:
            near = nearest(predicted, progress)
        document["nearest"] = None if near is None else near.to_dict(communication=False)
        document["levers"] = list(levers(predicted))
    if json:
        print_json(document)
    else:
        from nanum.report.terminal import print_prediction

        print_prediction(document, stdout_console(), asked.defaults)
        if seen is not None:
            from nanum.report.observed import print_observed

            print_observed(document, stdout_console())
    return GOOD if document["fits"] else BAD_NEWS


for command in (scale, verify, measure, validate):
    app.command()(command)


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
