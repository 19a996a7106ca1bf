"""What is trained on a rank, before it is divided: a stage of a model, of whichever sort."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nanum.live.decoder import Decoder
from nanum.live.pictures import PictureEncoder
from nanum.live.stacks import EncoderDecoder
from nanum.model import Model

Stage = Decoder | PictureEncoder | EncoderDecoder


def new_stage(m: Model, layers: Sequence[int], *, embeds: bool, heads: bool, positions: torch.Tensor) -> Stage:
    """Layers of a model, with its ends where they are asked for; `positions` as `Decoder` has them. An encoder with a
    decoder is whole.
    """
    if m.encoder_layers:
        return EncoderDecoder(m)
    if m.patches is not None:
        return PictureEncoder(m, layers, embeds=embeds, heads=heads)
    return Decoder(m, layers, embeds=embeds, heads=heads, positions=positions)
