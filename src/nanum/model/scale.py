"""A model made smaller, in the same proportions, so that it can be trained anywhere."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from nanum.errors import Refused
from nanum.model import Attention, Experts, LatentAttention, Layer, LinearAttention, Mlp, Model

LEAST_HEAD_DIM = 8
MULTIPLE = 8  # of a feed-forward block's width, or a rank's


def scaled(model: Model, *, layers: int | None = None, hidden: int | None = None, vocab: int | None = None) -> Model:
    """`model` with as many layers, that hidden size and that vocabulary; None leaves one as it is.

    Of an encoder with a decoder each has its half of the layers, the decoder the odd one. Heads stay as many as the
    hidden size has room for, in the same groups, and the other widths keep their proportion to the hidden size, in
    layers of every kind. Without dropout, since every division of it must give the same numbers.

    Raises:
        Refused: the hidden size does not divide into heads.
    """
    wide = hidden or model.hidden_size

    def smaller(layer: Layer) -> Layer:
        a, mlp = layer.attention, layer.mlp
        if wide != model.hidden_size:
            a = _attention(a, Fraction(wide, model.hidden_size), wide, model.name)
            mlp = _feed_forward(mlp, Fraction(wide, model.hidden_size))
        cross = layer.cross
        if cross is not None:
            sized = replace(a, dropout=0.0)
            assert isinstance(sized, Attention)
            same = {"num_attention_heads", "num_key_value_heads", "head_dim"}
            cross = replace(cross, dropout=0.0, **{name: getattr(sized, name) for name in same})
        if isinstance(mlp, Mlp):
            mlp = replace(mlp, dropout=0.0)
        return Layer(replace(a, dropout=0.0), mlp, cross)

    ordinary = smaller(model.ordinary)
    if model.encoder_layers:
        model = _stacks(model, layers or model.num_hidden_layers)
    return replace(
        model,
        hidden_size=wide,
        num_hidden_layers=layers or model.num_hidden_layers,
        vocab_size=vocab or model.vocab_size,
        attention=ordinary.attention,
        mlp=ordinary.mlp,
        cross=ordinary.cross,
        leading=tuple(map(smaller, model.leading)),
        alternates=tuple(map(smaller, model.alternates)),
        embedding_size=model.embedding_size and _width(model.embedding_size, Fraction(wide, model.hidden_size)),
        hidden_dropout=0.0,
    )


def _stacks(model: Model, layers: int) -> Model:
    """An encoder with a decoder of so many layers together."""
    if layers < 2:
        raise Refused(f"--layers {layers}: {model.name} is an encoder with a decoder, of a layer each at the least")
    n, whole = layers // 2, model.encoder_layers
    encoder, opens = model.leading[:whole], model.leading[whole]
    return replace(model, encoder_layers=n, leading=(encoder[0], *[encoder[-1]] * (n - 1), opens))


def _width(size: int, ratio: Fraction) -> int:
    return size if ratio == 1 else max(MULTIPLE, round(size * ratio / MULTIPLE) * MULTIPLE)


AnyAttention = Attention | LatentAttention | LinearAttention


def _attention(a: AnyAttention, ratio: Fraction, hidden: int, name: str) -> AnyAttention:
    if isinstance(
        a, LatentAttention
    ):  # heads stay as large as they are: it is their number that hidden sizes differ in
        return replace(
            a,
            num_attention_heads=max(1, int(a.num_attention_heads * ratio)),
            q_lora_rank=a.q_lora_rank and _width(a.q_lora_rank, ratio),
            kv_lora_rank=_width(a.kv_lora_rank, ratio),
        )
    groups = a.num_attention_heads // a.num_key_value_heads
    if isinstance(a, LinearAttention):
        keys = max(1, int(a.num_key_heads * ratio))
        return replace(a, num_key_heads=keys, num_value_heads=keys * groups)
    fits = (
        kv
        for kv in range(min(a.num_key_value_heads, hidden // (LEAST_HEAD_DIM * groups)), 0, -1)
        if hidden % (kv * groups) == 0 and (hidden // (kv * groups)) % 2 == 0
    )
    kv_heads = next(fits, None)
    if kv_heads is None:
        raise Refused(f"--hidden {hidden} does not divide into heads of {name}: {groups} to a key")
    heads = kv_heads * groups
    head_dim = hidden // heads
    rotary = a.rotary and max(2, round(Fraction(a.rotary * head_dim, a.head_dim) / 2) * 2)
    return replace(a, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, rotary=rotary)


def _feed_forward(mlp: Mlp | Experts, ratio: Fraction) -> Mlp | Experts:
    if isinstance(mlp, Mlp):
        return _narrower(mlp, ratio)
    return replace(mlp, expert=_narrower(mlp.expert, ratio), shared=mlp.shared and _narrower(mlp.shared, ratio))


def _narrower(mlp: Mlp, ratio: Fraction) -> Mlp:
    return replace(mlp, intermediate_size=_width(mlp.intermediate_size, ratio))
