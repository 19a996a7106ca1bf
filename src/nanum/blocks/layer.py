"""A decoder layer: attention and a feed-forward block, with the residual stream and its norms around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from nanum.blocks.attention import attention_dims, cross_attention, self_attention
from nanum.blocks.body import Body, Emitted, Streams, emit, new_tape
from nanum.blocks.experts import expert_dims, mixture
from nanum.blocks.feed_forward import feed_forward
from nanum.blocks.latent import latent_attention, latent_dims
from nanum.blocks.linear_attention import linear_attention, linear_attention_dims
from nanum.blocks.stacks import Stack, bias_of_stack, memory_of_encoder, stack_kinds
from nanum.conventions import (
    ATTENTION_BLOCK,
    EVERYTHING,
    EXPERTS,
    EXPERTS_NORM,
    FEED_FORWARD,
    LATENT_NORM,
    NOTHING,
    Conventions,
)
from nanum.job import ALL, Routing, Trained
from nanum.layout import Layout, Recompute, Structure
from nanum.model import Attention, Experts, LatentAttention, Layer, LinearAttention, Mlp, Model, Run
from nanum.operators.elementwise import dropout, residual
from nanum.operators.norm import norm
from nanum.operators.tape import Tape
from nanum.sharding import Shapes, Tensor

Block = Callable[[Tensor], Tensor]
"""Attention, or a feed-forward block: from what is (mostly) normed to what is added to the residual stream."""


def layer_dims(layer: Layer, dims: Mapping[str, Any], layout: Layout, routing: Routing) -> dict[str, Any]:
    """Global sizes of what is inside a layer, beside `dims` of what is around it."""
    a, mlp = layer.attention, layer.mlp
    latent = latent_dims(a) if isinstance(a, LatentAttention) else {}
    linear = linear_attention_dims(a) if isinstance(a, LinearAttention) else {}
    tokens = dims["B"] * dims["S"]
    inner = {"F": mlp.intermediate_size} if isinstance(mlp, Mlp) else expert_dims(mlp, tokens, layout, routing)
    return {**attention_dims(a), **latent, **linear, **inner}


@dataclass(frozen=True)
class LayerKinds:
    """The layers of a model whose bodies differ. Where nothing before the first layer is trained, it is a kind of its
    own, the last of `kinds`: what it is given needs no gradient.
    """

    kinds: tuple[Layer, ...]
    runs: tuple[Run, ...]  # as the model's
    ungiven: bool = False  # is there such a first layer?
    stacks: tuple[Stack, ...] = ()  # of an encoder and a decoder

    @classmethod
    def of(cls, model: Model, trained: Trained) -> LayerKinds:
        if model.encoder_layers:
            kinds, runs, stacks = stack_kinds(model)
            return cls(kinds, runs, stacks=stacks)
        if trained.ends:
            return cls(model.kinds, model.runs)
        (times, (first, *others)), *rest = model.runs
        apart: list[Run] = [(1, (len(model.kinds),)), *((1, (kind,)) for kind in others)]
        more: list[Run] = [(times - 1, (first, *others))] if times > 1 else []
        return cls((*model.kinds, model.kinds[first]), (*apart, *more, *rest), ungiven=True)

    @cached_property
    def in_order(self) -> tuple[int, ...]:
        """The kind of each layer of the model."""
        return tuple(kind for times, kinds in self.runs for kind in kinds * times)

    def parts(self, chunk: int) -> tuple[tuple[int, ...], ...]:
        """What of a model may be one part of a stage: each kind of layer, or all sequences of kinds of `chunk` layers
        and, at a stage's end, of fewer.
        """
        if chunk == 1:
            return tuple((kind,) for kind in range(len(self.kinds)))
        every = self.in_order
        sizes = range(1, min(chunk, len(every)) + 1)
        return tuple(dict.fromkeys(every[i : i + n] for n in sizes for i in range(len(every) - n + 1)))

    def given_grad(self, kind: int) -> bool:
        """Does what a layer of this kind is given need a gradient?"""
        return not self.ungiven or kind < len(self.kinds) - 1

    def is_last(self, kind: int) -> bool:
        """Are its kind's gradients, of what the layers of a stack share, the first?"""
        return any(kind == stack.last for stack in self.stacks)


def emit_layers(
    model: Model,
    kinds: tuple[Layer, ...],
    shapes: Shapes,
    conventions: Conventions,
    structure: Structure,
    trained: Trained = ALL,
    *,
    given_grad: bool = True,
    last: bool = False,
) -> Emitted:
    """One layer, or several as one part, forward and backward; `given_grad` where its input needs a gradient, `last` of
    its stack.
    """
    tape = new_tape(shapes, conventions, structure, trained, own_trained=trained.layers, adapters=True)
    splits = Streams.of(structure)
    x = Tensor("x", ("B", "S", "D"), splits.stream, tape.dtype)

    def through() -> Tensor:
        y = x
        for kind in kinds:
            a, bias = kind.attention, None
            if isinstance(a, Attention) and a.relative_buckets:
                bias = bias_of_stack(tape, a, structure, last=last)
            memory = memory_of_encoder(tape, splits, structure, last=last) if kind.cross else None
            y = decoder_layer(tape, y, model, kind, splits, bias, memory)
        return y

    return emit(tape, through, x=x, given_grad=given_grad)


def decoder_layer(
    t: Tape,
    x: Tensor,
    model: Model,
    kind: Layer,
    splits: Streams,
    bias: Tensor | None = None,
    memory: Tensor | None = None,
) -> Tensor:
    """What a layer makes of the residual stream, with a `bias` of its scores and the `memory` of an encoder, where its
    kind has them.
    """
    a, mlp = kind.attention, kind.mlp

    def attend(h: Tensor) -> Tensor:
        if isinstance(a, LatentAttention):
            return latent_attention(t, h, a, splits)
        if isinstance(a, LinearAttention):
            return linear_attention(t, h, a, splits)
        return self_attention(t, h, a, splits, positions=model.position, bias=bias)

    def feed(h: Tensor) -> Tensor:
        with t.region(FEED_FORWARD if isinstance(mlp, Mlp) else EXPERTS):
            return feed_forward(t, h, mlp, splits) if isinstance(mlp, Mlp) else mixture(t, h, mlp, splits)

    if model.placement.startswith("parallel"):
        return _side_by_side(t, x, model, attend, feed)
    latent = LATENT_NORM if isinstance(a, LatentAttention) else ""
    mixed = EXPERTS_NORM if isinstance(mlp, Experts) else ""
    with t.region(ATTENTION_BLOCK):
        between = _in_turn(t, x, "norm1", model, attend, latent)
    if kind.cross is not None and memory is not None:
        between = _in_turn(t, between, "norm_cross", model, partial(cross_attention, t, memory, kind.cross, splits), "")
    y = _in_turn(t, between, "norm2", model, feed, mixed)
    t.frame(x)
    return y


def layer_body(layer: Emitted, recompute: Recompute) -> Body:
    """The layer under a recompute mode: full keeps its input alone, selective what the engine keeps."""
    kept = {"none": EVERYTHING, "full": NOTHING, "selective": layer.tape.conventions.selective}
    return layer.body(kept[recompute])


def _in_turn(t: Tape, x: Tensor, name: str, model: Model, block: Block, region: str) -> Tensor:
    """A block and its residual, with the norms where the model has them; the one before it is a `region`."""
    before, after = model.placement in ("pre", "sandwich"), model.placement in ("post", "sandwich")
    with t.region(region):
        h = norm(t, x, name, model.norm) if before else x
    out = block(h)
    if after:
        out = norm(t, out, f"{name}_after" if before else name, model.norm)
    y = residual(t, x, dropout(t, out, model.hidden_dropout))
    return norm(t, y, name, model.norm) if model.placement == "post_residual" else y


def _side_by_side(t: Tape, x: Tensor, model: Model, attend: Block, feed: Block) -> Tensor:
    """Attention and the feed-forward block both of the layer's input, under one norm or each its own."""
    h = norm(t, x, "norm1", model.norm)
    g = norm(t, x, "norm2", model.norm) if model.placement == "parallel_two_norms" else h
    y = residual(t, x, dropout(t, t.apart(h, attend), model.hidden_dropout))
    out = residual(t, y, dropout(t, t.apart(g, feed), model.hidden_dropout))
    t.frame(x, h, g, y)
    return out
