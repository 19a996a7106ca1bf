"""The parts of `verify` that need no run: models made smaller, gloo's bytes, files written whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanum import files
from nanum.errors import Refused
from nanum.job import Job
from nanum.layout import Layout
from nanum.model import Attention, Layer, Model, load
from nanum.model.presets import presets
from nanum.model.scale import scaled
from nanum.verify.case import not_run
from nanum.verify.gloo import received_bytes

MODELS = [preset.name for preset in presets()]


def told(model: Model) -> tuple[Layer, ...]:
    """The layers that a model states; of an encoder with a decoder, whose lengths change, those at the borders."""
    if model.encoder_layers:
        return model.leading[0], model.leading[model.encoder_layers], model.ordinary
    return *model.leading, *model.alternates, model.ordinary


@given(st.sampled_from(MODELS), st.integers(1, 6), st.sampled_from([64, 96, 128, 192, 256, 384]), st.integers(8, 4096))
def test_a_smaller_model_keeps_its_proportions(name: str, layers: int, hidden: int, vocab: int) -> None:
    model = load(name)
    plain = [kind.attention for kind in model.kinds if isinstance(kind.attention, Attention)]
    groups = {a.num_attention_heads // a.num_key_value_heads for a in plain}
    if any(hidden % (2 * each) or hidden < 8 * each for each in groups):
        with pytest.raises(Refused, match=f"--hidden {hidden}"):
            scaled(model, layers=layers, hidden=hidden, vocab=vocab)
        return
    layers += model.encoder_layers > 0
    small = scaled(model, layers=layers, hidden=hidden, vocab=vocab)
    assert (small.num_hidden_layers, small.hidden_size, small.vocab_size) == (layers, hidden, vocab)
    assert (small.norm, small.position, small.placement) == (model.norm, model.position, model.placement)
    assert small.hidden_dropout == 0.0
    for large, kind in zip(told(model), told(small), strict=True):
        a, b = large.attention, kind.attention
        assert b.dropout == 0.0
        assert b.num_attention_heads // b.num_key_value_heads == a.num_attention_heads // a.num_key_value_heads
        if isinstance(b, Attention):
            assert b.num_attention_heads * b.head_dim == hidden
            assert b.rotary_dim % 2 == 0
            assert b.rotary_dim <= b.head_dim
            assert (b.rotary_dim == b.head_dim, b.rotary_dim == 0) == (a.rotary_dim == a.head_dim, a.rotary_dim == 0)
        else:
            assert b.head_dim == a.head_dim
        assert (kind.mlp.gated, type(kind.mlp)) == (large.mlp.gated, type(large.mlp))
        for wide, narrow in zip(large.widths, kind.widths, strict=False):
            assert abs(narrow - wide * hidden / model.hidden_size) <= 8


def test_unscaled_is_the_same_but_for_dropout() -> None:
    model = load("llama-3.1-8b")
    assert scaled(model) == model
    assert scaled(load("gpt2")).hidden_dropout == 0.0


@pytest.mark.parametrize(
    ("kind", "ranks", "received"),
    [
        # Measured on loopback sockets, of a buffer of 16 MiB: facts that a ring and its exceptions explain.
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("all_gather", 2, 0.5),
        ("all_gather", 4, 0.75),
        ("all_to_all", 4, 0.75),
        ("reduce_scatter", 2, 1.0),  # twice the ideal
        ("reduce_scatter", 4, 1.5),
        ("send", 2, 1.0),
    ],
)
def test_what_gloo_brings_to_a_rank(kind: str, ranks: int, received: float) -> None:
    assert received_bytes(kind, 16 << 20, ranks) == received * (16 << 20)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    files.write_whole(file, "one", force=False)
    with pytest.raises(Refused, match="is there already"):
        files.write_whole(file, "two", force=False)
    assert file.read_text() == "one"
    files.write_whole(file, "two", force=True)
    assert file.read_text() == "two"
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(Refused, match="there is no folder"):
        files.write_whole(tmp_path / "nowhere" / "a.toml", "one", force=False)
    with pytest.raises(Refused, match="is a folder"):
        files.write_whole(tmp_path, "one", force=True)


def test_a_link_stays_and_what_it_points_to_is_written(tmp_path: Path) -> None:
    """A file in another folder, one that is not there yet, and what is no file."""
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "a.toml", tmp_path / "there" / "b.toml"
    link.symlink_to(target)
    for content, force in (("one", False), ("two", True)):
        files.write_whole(link, content, force=force)
        assert (link.is_symlink(), target.read_text()) == (True, content)
    target.chmod(0o600)
    files.write_whole(link, "three", force=True)
    assert target.stat().st_mode & 0o777 == 0o600  # whom it was kept from, it stays kept from
    assert list(target.parent.iterdir()) == [target]
    for name, to, why in (("c", "c.toml", "leads back to itself"), ("d", os.devnull, "is a device")):
        (tmp_path / f"{name}.toml").symlink_to(to)
        with pytest.raises(Refused, match=why):
            files.write_whole(tmp_path / f"{name}.toml", "one", force=True)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder that takes no files")
def test_a_folder_that_takes_no_files_is_named() -> None:
    with pytest.raises(Refused, match=r"^/proc/x.toml: the folder /proc takes no files$"):
        files.check_writable(Path("/proc/x.toml"), force=True)


def test_what_cannot_be_written_is_not_left_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(Refused, match="No space left"):
        files.write_whole(tmp_path / "a.toml", "one", force=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "layout", "said"),
    [
        ("gemma-3-1b", {}, None),
        ("gpt-j-6b", {"tp": 2}, None),
        ("opt-350m", {"dp_shard": 2}, None),
        ("opt-350m", {"tp": 2}, "a narrow table, which is not run with tp=2"),
        ("olmo-2-7b", {"tp": 2}, "norms of all heads at once, which is not run with tp=2"),
        ("bloom-560m", {}, "positions by alibi"),
        ("gpt-oss-20b", {}, "sinks"),
        ("mistral-7b-v0.1", {}, "a window shorter than seq_len=8192"),
    ],
)
def test_what_is_not_run_is_said(name: str, layout: dict[str, int], said: str | None) -> None:
    job = Job(8192 if said and "window" in said else 64, 4)
    found = not_run(load(name), job, Layout(**layout))
    assert any(said in reason for reason in found) if said else found == []
