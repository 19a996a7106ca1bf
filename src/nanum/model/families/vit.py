"""Encoders of pictures: ViT, bare as its published counts are, or with a classifier of the class token."""

from __future__ import annotations

from collections.abc import Iterator

from nanum.model import Model
from nanum.model.families.decoder import attention, decoder, renamed, ungated
from nanum.model.families.neox import fits_heads
from nanum.model.keys import (
    ACTIVATION,
    FLAG,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    PROBABILITY,
    TABLE,
    Family,
    Values,
    whole,
)
from nanum.model.patches import Patches

BARE = "a classifier, which the config names no classes for: the loss is of the class token's own row"
_KEYS = {
    "hidden_size": HIDDEN.must(),
    "num_hidden_layers": LAYERS.must(),
    "num_attention_heads": HEADS.must(),
    "intermediate_size": INTERMEDIATE.must(),
    "hidden_act": ACTIVATION.or_("gelu"),
    "image_size": whole(2**14).or_(224),
    "patch_size": whole(2**10).or_(16),
    "num_channels": whole(2**10).or_(3),
    "qkv_bias": FLAG.or_(True),
    "hidden_dropout_prob": PROBABILITY.or_(0.0),
    "attention_probs_dropout_prob": PROBABILITY.or_(0.0),
    "num_labels": whole(2**24, 0),
    "id2label": TABLE,
}


def _vit(own: Values, name: str, source: str) -> Model:
    """Norms before each block and a last one; as many classes as `num_labels` says, or `id2label` names: without
    either there is no classifier.
    """
    v = renamed(own, {"attention_probs_dropout_prob": "attention_dropout"})
    patches = Patches(v["image_size"], v["patch_size"], v["num_channels"])
    labels = v["num_labels"] if v["num_labels"] is not None else len(v["id2label"] or ())
    sizes = {"vocab_size": labels, "max_position_embeddings": patches.seq_len, "tie_word_embeddings": False}
    return decoder(
        {**v, **sizes}, name, source,
        attention=attention(v, qkv_bias=v["qkv_bias"], output_bias=True, causal=False),
        mlp=ungated(v),
        norm="layer_norm",
        position="learned",
        head_bias=labels > 0,
        hidden_dropout=v["hidden_dropout_prob"],
        patches=patches,
        left_out=() if labels else (BARE,),
    )  # fmt: skip


def _fits(v: Values) -> Iterator[str]:
    yield from fits_heads(v)
    if v["image_size"] % v["patch_size"]:
        yield f"patch_size={v['patch_size']} does not divide image_size={v['image_size']}"


FAMILIES = {"vit": Family(_KEYS, _vit, _fits, ignored=("encoder_stride", "pooler_output_size", "pooler_act"))}
