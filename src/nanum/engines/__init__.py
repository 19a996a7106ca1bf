"""Engines: the conventions that turn one layout into different bytes, each in its own file, with the version it was
read at.
"""

from __future__ import annotations

from nanum.engines.engine import Engine
from nanum.errors import Refused


def names() -> tuple[str, ...]:
    return ("torchtitan", "megatron", "torch", "deepspeed", "accelerate", "nanotron")


def load(name: str) -> Engine:
    """The engine of that name.

    Raises:
        Refused: there is none.
    """
    if name == "torchtitan":
        from nanum.engines.torchtitan import TORCHTITAN

        return TORCHTITAN
    if name == "megatron":
        from nanum.engines.megatron import MEGATRON

        return MEGATRON
    if name == "torch":
        from nanum.engines.torch import TORCH

        return TORCH
    if name == "deepspeed":
        from nanum.engines.deepspeed import DEEPSPEED

        return DEEPSPEED
    if name == "accelerate":
        from nanum.engines.accelerate import ACCELERATE

        return ACCELERATE
    if name == "nanotron":
        from nanum.engines.nanotron import NANOTRON

        return NANOTRON
    raise Refused([f"--engine {name} is unknown; there are {', '.join(names())}"])
