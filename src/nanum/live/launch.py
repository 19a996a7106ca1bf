"""How ranks meet: those forked on one machine at a file, those that torchrun launched at a port.

A rank's work is the same either way, and makes its process group by `join`. `supervisor.run_ranks` does it in all ranks
of this machine, and `run_launched` in the one that this process was launched as.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nanum.errors import Refused
from nanum.live.pulse import Board, Pulse
from nanum.live.rank import debugging, how_it_failed, lost_a_peer
from nanum.live.supervisor import RankFailed
from nanum.processes import signals_unwind, temporary_folder

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun tells each rank
PATIENCE_SECONDS = 20.0  # for a rank that is behind
JOIN_SECONDS = 300.0  # for one that has yet to start


def launched() -> bool:
    """Whether this process is one rank of a launch, by torchrun or by hand."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_ranks() -> int:
    return int(os.environ["WORLD_SIZE"])


def is_first() -> bool:
    return int(os.environ["RANK"]) == 0


def run_launched(entry: Callable[[int, Pulse, Path], Any]) -> Any:
    """Be the one rank that this process was launched as: do `entry(rank, pulse, folder)`, and return what it returns.

    Nobody watches here: torchrun ends the ranks when one of them ends badly, and one that has waited for others as long
    as `join` says ends by itself.

    Raises:
        RankFailed: this rank failed; the message says when that is for the sake of another.
        Refused: it cannot join the others, or has no folder to write into, or `entry` refused.
    """
    board = Board(1)
    rank = int(os.environ["RANK"])
    folder = temporary_folder()
    with signals_unwind():
        try:
            return entry(rank, board.pulse(0), folder)
        except Refused:
            raise
        except Exception as error:
            if debugging():
                raise
            how = f"lost another rank ({error})" if lost_a_peer(error) else how_it_failed(error)
            last = board.read(0).text
            after = f", after: {last}" if last else ", before its first operation"
            raise RankFailed(f"rank {rank} {how}{after}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def join(
    rank: int, ranks: int, folder: Path, backend: str = "gloo", *, patience_seconds: float = PATIENCE_SECONDS
) -> None:
    """Make the process group of all ranks: through a file in `folder`, or through the port of the launch.

    `patience_seconds` is how long a launched rank waits in an exchange before it gives up. A forked one is watched, and
    waits.

    Raises:
        Refused: the launch's port is busy, or its environment is not whole.
    """
    if not launched():
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's name need not resolve, and nobody else listens
        store = dist.FileStore(str(folder / "rendezvous"), ranks)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
        return
    if missing := [name for name in LAUNCHED if name not in os.environ]:
        raise Refused([f"a launched rank needs {name}, which torchrun sets" for name in missing])
    try:
        store, rank, ranks = next(dist.rendezvous("env://", timeout=timedelta(seconds=JOIN_SECONDS)))
    except dist.DistNetworkError as error:
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        if "EADDRINUSE" in str(error):
            raise Refused(f"port {port} of {address} is busy: name another with --master-port (MASTER_PORT)") from None
        raise
    # All are here before patience begins: one machine may start long after another.
    store.set(f"joins/{rank}", "")
    store.wait([f"joins/{other}" for other in range(ranks)], timedelta(seconds=JOIN_SECONDS))
    patience = timedelta(seconds=patience_seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=patience)
