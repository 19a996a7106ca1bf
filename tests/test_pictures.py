"""Encoders of pictures, beside Dosovitskiy et al. 2020 (arXiv 2010.11929) and counts by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanum import engines
from nanum.account.memory import peak
from nanum.account.traffic import flops, traffic
from nanum.build import build
from nanum.cluster import load as cluster
from nanum.division.parts import emit_parts
from nanum.errors import Refused
from nanum.job import Job, default_global_batch_size
from nanum.layout import Layout, Structure
from nanum.model import Model, Patches, load
from nanum.model.config import from_config
from nanum.model.presets import presets
from nanum.prediction.reference import parameters, reference
from nanum.rules import GENERAL, broken

VIT = {preset.name: preset for preset in presets() if preset.family == "ViT"}
BASE = VIT["vit-base-patch16-224"].config
TORCH = engines.load("torch")


def vit(**change: Any) -> Model:
    return from_config({**BASE, **change}, "vit")


def test_rows_of_a_picture() -> None:
    """Section 3.1: N = HW / P^2 patches of P^2 C numbers each, and the class token before them."""
    assert Patches(224, 16, 3) == load("ViT-B/16").patches
    assert (Patches(224, 16, 3).count, Patches(224, 16, 3).numbers, Patches(224, 16, 3).seq_len) == (196, 768, 197)
    assert load("ViT-H/14").max_position_embeddings == 257


def test_published_counts_have_no_classifier_and_users_files_may() -> None:
    """The checkpoint of ViT-B/16 with ImageNet's 1,000 classes has 86,567,656 parameters (timm's table of models)."""
    assert parameters(vit()) == 85_798_656
    assert parameters(vit(num_labels=1000)) == 85_798_656 + 769 * 1000 == 86_567_656
    assert vit(id2label={str(i): f"class {i}" for i in range(10)}).vocab_size == 10
    assert any("classifier" in what for what in vit().left_out)
    assert not vit(num_labels=1000).left_out
    assert parameters(vit(qkv_bias=False)) == 85_798_656 - 12 * 3 * 768


@given(
    st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.integers(1, 3), st.integers(0, 9)
)  # fmt: skip
def test_parameters_and_flops_by_hand(
    layers: int, heads: int, side: int, patch: int, channels: int, labels: int
) -> None:
    """Forward and backward: six FLOPs for each weight and row (of a projection whose input needs no gradient, four),
    and twelve of attention for each layer, pair of rows and entry of a head.
    """
    d, f = 16 * heads, 40 * heads
    model = vit(
        num_hidden_layers=layers, num_attention_heads=heads, hidden_size=d, intermediate_size=f,
        image_size=side * patch, patch_size=patch, num_channels=channels, num_labels=labels,
    )  # fmt: skip
    n, p = side * side, channels * patch * patch
    matrices = layers * (4 * d * d + 2 * d * f)
    vectors = layers * (4 * d + f + d + 4 * d) + 2 * d
    table = (n + 1) * d + d
    assert parameters(model) == matrices + vectors + table + d * p + d + (labels * (d + 1))
    rows = n + 1
    expected = 6 * rows * matrices + 12 * layers * rows * rows * d + 4 * n * d * p + 6 * d * labels
    assert reference(model, rows).model_flops_per_sequence == pytest.approx(expected)


def test_what_both_ends_save_for_each_picture() -> None:
    """bf16: the projection saves its input alone, which is the batch's, and positions save nothing; the classifier
    keeps the last norm's whole result for the sake of one row, the norm its input and two fp32 numbers a row, and the
    loop its logits.
    """
    b, d, labels = 4, 768, 1000
    model = vit(num_labels=labels)
    rows = 197
    parts = emit_parts(model, Job(rows, b), Layout(micro_batch_size=b, structure=Structure(zero=1)), TORCH)
    stream = 2 * b * rows * d
    assert int(peak(parts.bodies.embedding.forward).net) == 0
    assert int(peak(parts.bodies.head.forward).net) == 2 * stream + 8 * b * rows + 2 * b * labels


def test_neither_end_is_divided() -> None:
    """Of tensor parallelism only layers' sums are exchanged: two forward and two backward a layer."""
    layout = Layout(tp=2, micro_batch_size=2, structure=Structure(zero=1, tensor="tensor"))
    engine = engines.load("megatron")
    found = [
        (key.kind, int(total.calls))
        for key, total in traffic(build(vit(num_labels=1000), Job(197, 2), layout, engine, 0).program).items()
        if key.axes == ("tp",) and total.calls and key.what == "activations"
    ]
    assert sum(calls for _, calls in found) == 4 * 12
    assert {kind for kind, _ in found} == {"all_reduce"}


def test_a_batch_that_ranks_divide() -> None:
    assert default_global_batch_size(197) == 4 * 2**20 // 197
    assert default_global_batch_size(197, fixed=True) == 16384
    assert default_global_batch_size(2**23, fixed=True) == 1


@pytest.mark.parametrize(
    ("seq_len", "layout", "said"),
    [
        (128, Layout(dp_shard=8), "seq_len=128, but a picture of vit has 197: the class token and 196 patches"),
        (197, Layout(dp_shard=4, tp=2, structure=Structure(tensor="sequence")), "add --no-sp"),
        (197, Layout(dp_shard=4, cp=2, structure=Structure(cp_kind="ring")), "leave out --cp"),
        (197, Layout(dp_shard=8, structure=Structure(loss="chunked")), "one row of them for each picture"),
    ],
)
def test_what_a_picture_is_not(seq_len: int, layout: Layout, said: str) -> None:
    found = broken(GENERAL, vit(), Job(seq_len, 64), cluster("1x8xh100-sxm"), layout)
    assert any(said in reason for reason in found), found


def test_what_a_config_is_not() -> None:
    with pytest.raises(Refused, match="patch_size=15 does not divide image_size=224"):
        vit(patch_size=15)
    with pytest.raises(Refused, match="num_labels = -1"):
        vit(num_labels=-1)


def test_flops_do_not_depend_on_how_a_picture_is_trained() -> None:
    model = vit(num_hidden_layers=2, num_labels=10)
    layouts = [
        Layout(dp_shard=2),
        Layout(dp_shard=2, micro_batch_size=4),
        Layout(dp_replicate=2, structure=Structure(zero=0)),
    ]
    found = {float(flops(build(model, Job(197, 8), layout, TORCH, 0).program)) for layout in layouts}
    assert len(found) == 1
