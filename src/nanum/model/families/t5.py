"""An encoder and a decoder: T5, its version 1.1, and FLAN's."""

from __future__ import annotations

from collections.abc import Iterator

from nanum.model import Model
from nanum.model.families.decoder import decoder, renamed
from nanum.model.keys import (
    FLAG,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    POSITIONS,
    PROBABILITY,
    TEXT,
    VOCABULARY,
    Family,
    Values,
    only,
    whole,
)
from nanum.model.layer import ACTIVATIONS, Attention, Layer, Mlp

GATED = "gated-"

_KEYS = {
    "vocab_size": VOCABULARY.or_(32128),
    "d_model": HIDDEN.must(),
    "d_kv": HEAD_DIM.or_(64),
    "d_ff": INTERMEDIATE.must(),
    "num_layers": LAYERS.must(),
    "num_decoder_layers": LAYERS,
    "num_heads": HEADS.must(),
    "relative_attention_num_buckets": whole(2**20, 2).or_(32),
    "dropout_rate": PROBABILITY.or_(0.0),
    "feed_forward_proj": TEXT.or_("relu"),
    "tie_word_embeddings": FLAG.or_(True),
    "is_encoder_decoder": only(True).or_(True),
    "n_positions": POSITIONS.or_(512),
}


def _t5(own: Values, name: str, source: str) -> Model:
    """RMS norms before each block, no biases, and positions by a bias of scores alone, which the layers of a stack
    share and the first has. Where the head is tied its input is scaled (modeling_t5.py: `T5ForConditionalGeneration`).
    """
    v = renamed(own, {"d_model": "hidden_size", "n_positions": "max_position_embeddings"})
    n = v["num_layers"]
    m = v["num_decoder_layers"] or n
    kind = v["feed_forward_proj"]
    mlp = Mlp(v["d_ff"], kind.startswith(GATED), ACTIVATIONS[kind.removeprefix(GATED)], dropout=v["dropout_rate"])

    def attention(*, causal: bool, buckets: int = 0, table: bool = False) -> Attention:
        return Attention(
            v["num_heads"], v["num_heads"], v["d_kv"], rotary=0, causal=causal, dropout=v["dropout_rate"],
            relative_buckets=buckets, has_table=table,
        )  # fmt: skip

    def layer(*, decodes: bool, first: bool) -> Layer:
        cross = attention(causal=False) if decodes else None
        buckets = v["relative_attention_num_buckets"]
        return Layer(attention(causal=decodes, buckets=buckets, table=first), mlp, cross)

    encoder = [layer(decodes=False, first=i == 0) for i in range(n)]
    ordinary = layer(decodes=True, first=False)
    return decoder(
        {**v, "num_hidden_layers": n + m}, name, source,
        attention=ordinary.attention,
        mlp=ordinary.mlp,
        cross=ordinary.cross,
        leading=(*encoder, layer(decodes=True, first=True)),
        encoder_layers=n,
        position="relative",
        scaled_head=v["tie_word_embeddings"],
        hidden_dropout=v["dropout_rate"],
    )  # fmt: skip


def _fits(v: Values) -> Iterator[str]:
    kind = v["feed_forward_proj"]
    if kind.removeprefix(GATED) not in ACTIVATIONS:
        yield (f'feed_forward_proj = "{kind}" is not one of {", ".join(ACTIVATIONS)}, alone or after {GATED}')


FAMILIES = {
    "t5": Family(
        _KEYS,
        _t5,
        _fits,
        ignored=(
            *("relative_attention_max_distance", "dense_act_fn", "is_gated_act", "initializer_factor", "output_past"),
            *("classifier_dropout", "layer_norm_epsilon", "feed_forward_act"),
        ),
    )
}
