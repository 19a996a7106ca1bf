"""From the user's words to what `measure` measures, or reads. Every reason why it cannot be is raised at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nanum import files, processes
from nanum.cli.reader import Reader, loaded
from nanum.cluster import Cluster
from nanum.cluster import load as load_cluster
from nanum.errors import LONGEST_NAME, Refused, cut_short

DEVICES = ("auto", "cuda", "cpu")


@dataclass(frozen=True)
class Measuring:
    """This machine is measured, or where there is a `base`, that cluster gets its exchanges from logs."""

    file: Path
    logs: list[Path]
    base: Cluster | None
    sized: bool  # does the base say how many nodes and GPUs there are?


@dataclass(frozen=True)
class Words:
    """As the user said them."""

    logs: Sequence[str]
    output: str | None
    device: str
    chip: str | None
    cluster: str | None
    quick: bool
    logged: bool
    force: bool


def question(said: Words) -> Measuring:
    """Read what is asked, before anything is measured. Raises Refused with every reason."""
    reader = Reader({})
    base = _base(said, reader) if said.logged else None
    if not said.logged:
        _check_machine(said, reader)
    file = _file(said, reader)
    if reader.reasons:
        raise Refused(reader.reasons)
    return Measuring(file, [Path(log) for log in said.logs], base, sized=said.cluster is not None)


def _base(said: Words, reader: Reader) -> Cluster | None:
    """The cluster whose exchanges the logs are of."""
    if not said.logs:
        reader.reasons.append("--from-nccl-tests: which logs? Name their files")
    if said.quick or said.device != "auto":
        reader.reasons.append("--quick and --device are for measuring, and --from-nccl-tests measures nothing")
    if (said.chip is None) == (said.cluster is None):
        reader.reasons.append(
            "--from-nccl-tests needs either --chip NAME or --cluster CLUSTER: a log says nothing of a chip's FLOPs"
        )
        return None
    return loaded(load_cluster, said.cluster if said.cluster is not None else f"1x1x{said.chip}", reader)


def _check_machine(said: Words, reader: Reader) -> None:
    if said.logs or said.chip is not None or said.cluster is not None:
        reader.reasons.append("logs, --chip and --cluster are for --from-nccl-tests")
    if said.device not in DEVICES:
        reader.reasons.append(f"--device {cut_short(said.device, 24)}: must be {', '.join(DEVICES)}")
    if processes.torch_is_missing():
        reader.reasons.append(processes.MISSING_TORCH)


def _file(said: Words, reader: Reader) -> Path:
    if said.output is None:
        reader.reasons.append("-o FILE.toml is missing: where to write the cluster file")
        return Path()
    return cluster_file(said.output, reader, force=said.force)


def cluster_file(output: str, reader: Reader, *, force: bool) -> Path:
    """Where a cluster is to be written. Reasons why it cannot be are left with the reader."""
    file = Path(output)
    if file.suffix != ".toml":
        reader.reasons.append(f"-o {cut_short(output) or repr(output)}: must be a name that ends in .toml")
        return file
    if not file.stem.isprintable():  # it would be the cluster's name, which no file may have
        reader.reasons.append(f"-o {cut_short(repr(output))}: its name has characters that cannot be printed")
        return file
    if len(file.stem) > LONGEST_NAME:
        reader.reasons.append(f"-o {cut_short(output)}: its name is longer than {LONGEST_NAME} characters")
        return file
    try:
        files.check_writable(file, force=force)
    except Refused as refused:
        reader.reasons.extend(refused.reasons)
    return file


def say_lost_comments(file: Path) -> None:
    """On stderr, for the answer is written."""
    print(f"nanum: warning: {file}: the comments of the file that it replaced are not kept", file=sys.stderr)
