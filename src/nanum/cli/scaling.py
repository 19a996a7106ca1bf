"""`nanum scale`: the words that only it has, and the command."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from nanum.cli import flags, words
from nanum.cli.answers import BAD_NEWS, GOOD, ends, print_json, stdout_console, warn
from nanum.cli.layout_words import layout_of
from nanum.cli.reader import Flags, Reader, flag
from nanum.errors import Refused, cut_short
from nanum.layout import AXES, Layout
from nanum.units import whole_number

if TYPE_CHECKING:
    from nanum.scaling import Grows

MOST_COUNTS = 64


@dataclass(frozen=True)
class Asked:
    """What `scale` asks: a question; the layout of which `grows` grows, or None for the best; and counts of GPUs, or
    None for the default's.
    """

    question: words.Question
    layout: Layout | None
    grows: Grows | None
    gpus: tuple[int, ...] | None


def scale_question(model_word: str, cluster_word: str, given: Flags, *, best: bool) -> Asked:
    """Read what `scale` asks. Raises Refused with every reason."""
    reader = Reader(given)
    asked = words.question_of(model_word, cluster_word, reader)
    gpus = _counts(reader)
    readable = not reader.unread
    layout: Layout | None = None
    grows: Grows | None = None
    if best:
        said = [flag(name, given[name]) for name in flags.OF_LAYOUT if reader.said(name)]
        if said:
            reader.reasons.append(f"--best seeks a layout for each count of GPUs: leave out {', '.join(said)}")
    else:
        layout = layout_of(reader, asked.engine if asked else None, None)
        readable = not reader.unread
        if asked is not None and readable:
            grows = _grows(reader, layout, asked.cluster.gpus)
            reader.defaults.append(f"{grows} grows")
    if asked is not None and readable and reader.reasons:
        reader.reasons += words.broken_rules(asked, layout or Layout(), without_world=True)
    if asked is None or reader.reasons:
        raise Refused(reader.reasons)
    return Asked(replace(asked, defaults=tuple(reader.defaults)), layout, grows, gpus)


def _counts(reader: Reader) -> tuple[int, ...] | None:
    word = reader.word("gpus")
    if word is None:
        return None
    found: list[int] = []
    for each in word.split(","):
        try:
            found.append(whole_number(each))
        except ValueError as error:
            reader.reasons.append(f"--gpus {cut_short(repr(each.strip()), 24)} {error}")
    if len(found) > MOST_COUNTS:
        reader.reasons.append(f"--gpus has {len(found)} counts, but at most {MOST_COUNTS}")
    return tuple(found)


def _grows(reader: Reader, layout: Layout, gpus: int) -> Grows:
    """The axis that takes the GPUs that are added. Where the flags name a layout of the whole cluster, the copies where
    it has several, else the ranks that shard; where they leave GPUs over, the one that they do not name.
    """
    copies, shards = reader.said("dp_replicate"), reader.said("dp_shard")
    world = int(layout.world)
    if layout.structure.zero == 0 or (copies and layout.dp_replicate > 1 and (shards or world == gpus)):
        grows: Grows = "dp_replicate"
    elif shards and not copies and world != gpus:
        grows = "dp_replicate"
    else:
        grows = "dp_shard"
    if copies and shards and world != gpus:
        axes = "·".join(axis for axis in AXES if getattr(layout, axis) > 1) or "dp_shard"
        reader.reasons.append(
            f"{axes} = {world}, but the cluster has {gpus} GPUs: leave out --dp-replicate or --dp-shard, "
            "which then takes the GPUs that the others leave"
        )
    return grows


@ends
@flags.taking(flags.OF_JOB, flags.OF_LAYOUT)
def scale(
    ctx: typer.Context,
    model: flags.ModelWord,
    cluster: flags.ClusterWord,
    gpus: flags.Gpus = None,
    best: flags.Best = False,
    json: flags.AsJson = False,
    **said: Any,
) -> int:
    """The scaling law of the machine: ever more GPUs.

    \b
    Examples:
      nanum scale llama-3.1-8b 8x8xh100-sxm
      nanum scale llama-3.1-70b 32x8xh100-sxm --tp 8 --pp 4 --engine megatron --recompute selective
      nanum scale gpt2 8x8xa100-sxm-80gb --zero 0 --gpus 1,8,64,512
      nanum scale llama-3.1-8b 4x8xh100-sxm --best --json

    Step time, speed-up and efficiency on ever more GPUs of the same machine: with the same batch (strong form), and
    with one that grows with the GPUs (weak form), which is --global-batch-size on all of CLUSTER. Speed-ups are over
    one GPU that does the same step, were its memory large enough; those over the first count stand beside them.

    All flags of a layout are held but one: data parallelism grows. Of --dp-replicate and --dp-shard it is the one that
    is left out; where they name a layout of all of CLUSTER, the copies if there are several, else the ranks that shard.

    Then the serial fraction s: Amdahl's curve through the points and its limit 1/s, what s consists of at the largest
    count, and what each cut of it would buy.

    Exit code: 0 where it fits on some count, 1 where on none, 2 where the question cannot be asked.
    """
    asked = scale_question(model, cluster, ctx.params, best=best)
    warn(asked.question.cluster)

    from nanum.cli.progress import Progress
    from nanum.scaling import scale as answer

    gc.disable()  # as in plan
    q = asked.question
    with Progress("points") as progress:
        found = answer(
            q.model,
            q.job,
            q.cluster,
            asked.layout,
            q.engine.name,
            gpus=asked.gpus,
            grows=asked.grows,
            progress=progress,
        )
        document = found.to_dict()
    if json:
        print_json(document)
    else:
        from nanum.report.scaling import print_scaling

        print_scaling(document, stdout_console(), q.defaults)
    return GOOD if found.fits else BAD_NEWS
