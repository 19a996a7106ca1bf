"""The small models of `nanum verify --all`: of every kind of layer that can be run for real, one."""

from __future__ import annotations

from dataclasses import replace

from nanum.model import Attention, Experts, LatentAttention, Layer, Mlp, Model, Patches

SEQ_LEN = 64

_HEADS = Attention(num_attention_heads=8, num_key_value_heads=4, head_dim=16)
_GATED = Mlp(intermediate_size=352, gated=True, activation="silu")
LLAMA = Model(
    name="llama",
    hidden_size=128,
    vocab_size=1000,
    num_hidden_layers=2,
    max_position_embeddings=SEQ_LEN,
    attention=_HEADS,
    mlp=_GATED,
    norm="rms_norm",
    position="rotary",
    tie_word_embeddings=False,
)
GPT = Model(
    name="gpt",
    hidden_size=128,
    vocab_size=1000,
    num_hidden_layers=2,
    max_position_embeddings=SEQ_LEN,
    attention=Attention(8, 8, 16, qkv_bias=True, output_bias=True),
    mlp=Mlp(512, gated=False, activation="gelu", bias=True),
    norm="layer_norm",
    position="learned",
    tie_word_embeddings=True,
)
UNEVEN = replace(LLAMA, name="llama, uneven", hidden_size=126, vocab_size=1001, attention=Attention(9, 3, 14))
"""A vocabulary and a hidden size that no power of two divides."""
MIXTURE = replace(
    LLAMA,
    name="mixture",
    mlp=Experts(8, 2, Mlp(64, gated=True, activation="silu"), shared=Mlp(96, gated=True, activation="silu")),
    leading=(Layer(LLAMA.attention, LLAMA.mlp),),
)
"""A dense layer, and then layers of experts."""
LATENT = replace(LLAMA, name="latent", attention=LatentAttention(8, 48, 32, 8, 8, 16))
_NORMED = replace(_HEADS, qk_norm="head")
_GEGLU = replace(_GATED, activation="gelu")
SANDWICH = replace(
    LLAMA,
    name="sandwich",
    placement="sandwich",
    attention=_NORMED,
    mlp=_GEGLU,
    alternates=(Layer(replace(_NORMED, window=4096, rotary=0), _GEGLU),),
    tie_word_embeddings=True,
    logit_cap=30.0,
)
"""As Gemma 2 and 3: norms before and after each block and of each head, layers with and without a window in turn, and a
cap on logits.
"""
AFTER = replace(LLAMA, name="after", placement="post", attention=replace(_HEADS, qk_norm="width"))
"""As OLMo 2: norms after each block, and of all heads at once."""
PARALLEL = replace(
    GPT,
    name="parallel",
    placement="parallel",
    position="rotary",
    attention=Attention(8, 8, 16, rotary=8),
    head_bias=True,
    tie_word_embeddings=False,
)
"""As GPT-J: both blocks of one norm's result, half of each head turned, a head with a bias."""
PARALLEL_TWO = replace(PARALLEL, name="parallel, two norms", placement="parallel_two_norms", head_bias=False)
"""As GPT-NeoX: each block has a norm of its own."""
NARROW = replace(
    GPT,
    name="narrow",
    placement="post_residual",
    final_norm=False,
    embedding_size=64,
    unused_positions=2,
    mlp=Mlp(512, gated=False, activation="relu", bias=True),
)
"""As OPT-350m: norms of the sum with the residual, a narrow table, positions from the third row on, ReLU."""
ENCODER = replace(
    GPT,
    name="encoder",
    placement="post_residual",
    attention=Attention(8, 8, 16, qkv_bias=True, output_bias=True, causal=False),
    final_norm=False,
    embedding_norm=True,
    token_types=2,
    head_transform=True,
    head_bias=True,
)
"""As BERT: a token sees those that follow too; a head with a layer of its own."""
PICTURES = replace(
    GPT,
    name="pictures",
    attention=Attention(8, 8, 16, qkv_bias=True, output_bias=True, causal=False),
    patches=Patches(image_size=32, patch_size=4, num_channels=3),
    vocab_size=10,
    max_position_embeddings=SEQ_LEN + 1,
    tie_word_embeddings=False,
    head_bias=True,
)
"""As ViT: patches and a class token, of which the head is."""
PICTURES_ALONE = replace(PICTURES, name="pictures, no classifier", vocab_size=0, head_bias=False)
_RELATIVE = Attention(8, 8, 16, rotary=0, relative_buckets=32, causal=False)
_RELU = Mlp(512, gated=False, activation="relu")


def stacks(encoder: int, decoder: int, mlp: Mlp, *, tied: bool) -> Model:
    """As T5: an encoder and a decoder of so many layers, whose scores have a bias of the distance; a tied head's input
    is scaled.
    """
    first, later = replace(_RELATIVE, has_table=True), replace(_RELATIVE, causal=True)
    cross = replace(_RELATIVE, relative_buckets=0)
    leading = (Layer(first, mlp), *[Layer(_RELATIVE, mlp)] * (encoder - 1))
    return replace(
        LLAMA,
        name="stacks, tied" if tied else "stacks",
        num_hidden_layers=encoder + decoder,
        encoder_layers=encoder,
        leading=(*leading, Layer(replace(first, causal=True), mlp, cross)),
        attention=later,
        mlp=mlp,
        cross=cross,
        position="relative",
        tie_word_embeddings=tied,
        scaled_head=tied,
    )


STACKS, STACKS_TIED = stacks(3, 3, _GEGLU, tied=False), stacks(2, 3, _RELU, tied=True)
BARE = replace(
    LLAMA,
    name="bare",
    norm="layer_norm_no_weight",
    attention=replace(_HEADS, qk_norm="bare_head", gated=True),
    mlp=Mlp(512, gated=False, activation="relu2"),
    embedding_norm=True,
)
"""Norms without weights, a gate on attention's output, the square of ReLU."""
MODELS = {
    "llama": LLAMA,
    "gpt": GPT,
    "uneven": UNEVEN,
    "mixture": MIXTURE,
    "latent": LATENT,
    "sandwich": SANDWICH,
    "after": AFTER,
    "parallel": PARALLEL,
    "parallel two": PARALLEL_TWO,
    "narrow": NARROW,
    "encoder": ENCODER,
    "bare": BARE,
    "stacks": STACKS,
    "stacks, tied": STACKS_TIED,
    "pictures": PICTURES,
    "pictures alone": PICTURES_ALONE,
}
