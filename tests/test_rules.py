from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanum import cluster, model, plan
from nanum.errors import Refused
from nanum.job import Job, default_global_batch_size, default_seq_len
from nanum.layout import AXES, Layout, Structure
from nanum.rules import GENERAL, OF_JOB, OF_LAYOUT, broken

LLAMA = model.load("llama-3.1-70b")
GPT2 = model.load("gpt2")
JOB = Job(seq_len=8192, global_batch_size=512)
SEQUENCE = Structure(tensor="sequence", pipelined=True)
GOOD = Layout(dp_shard=4, tp=8, pp=2, structure=SEQUENCE)


CHIP = cluster.load("1x8xh100-sxm").chip


def of(gpus):
    return SimpleNamespace(gpus=gpus, chip=CHIP)


def reasons(layout, gpus=64, job=JOB, of_model=LLAMA):
    return broken(GENERAL, of_model, job, of(gpus), layout)


def test_a_possible_layout_has_no_reasons():
    assert reasons(GOOD) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dp_shard": 5}, "dp_replicate·dp_shard·cp·tp·pp = 80, but the cluster has 64 GPUs"),
        ({"tp": 7}, "tp=7 does not divide num_attention_heads=64"),
        ({"tp": 16}, "tp=16 does not divide num_key_value_heads=8 (of num_attention_heads=64)"),
        ({"tp": 5}, "tp=5 does not divide seq_len=8192, under sequence parallel"),
        ({"tp": 3}, "tp=3 does not divide intermediate_size=28672"),
        (
            {"micro_batch_size": 3, "dp_replicate": 2},
            "micro_batch_size·dp_replicate·dp_shard = 3·2·4 = 24 does not divide global_batch_size=512",
        ),
        ({"cp": 3}, "cp=3 does not divide seq_len=8192"),
        ({"cp": 2048}, "cp·tp=2048·8=16384 does not divide seq_len=8192, under sequence parallel"),
        (
            {"cp": 2, "structure": replace(SEQUENCE, cp_kind="ulysses")},
            "cp·tp=2·8=16 does not divide num_key_value_heads=8, under --cp-kind ulysses",
        ),
        (
            {"cp": 2, "structure": replace(SEQUENCE, cp_kind="ring", attention="eager")},
            "cp=2 by a ring puts a flash kernel's results together, and --attention eager has none",
        ),
        ({"structure": Structure(cp_kind="zigzag")}, "cp_kind=zigzag is not modelled"),
        ({"tp": 0}, "tp=0 is zero, and must be at least 1"),
        ({"pp": -2}, "pp=-2 is negative, and must be at least 1"),
        ({"tp": 2.5}, "tp=2.5 is not a whole number"),
        ({"tp": float("nan")}, "tp=nan is not a whole number"),
        ({"dp_shard": "four"}, "dp_shard=four is not a whole number"),
        ({"tp": True}, "tp=True is not a whole number"),
        ({"rank_order": ("pp", "tp")}, "rank_order=pp,tp does not name each of"),
        ({"structure": Structure(zero=4)}, "zero=4 is not modelled (known: 0, 1, 2, 3)"),
        ({"structure": Structure(schedule="zigzag")}, "schedule=zigzag is not modelled (known: gpipe, 1f1b, interl"),
        (
            {"structure": replace(SEQUENCE, schedule="zb-h2", virtual_stages=2)},
            "schedule=zb-h2 has one stage a rank, not virtual_stages=2: use interleaved, ",
        ),
        (
            {"structure": replace(SEQUENCE, schedule="dualpipe", virtual_stages=1)},
            "schedule=dualpipe has two stages a rank, not virtual_stages=1",
        ),
        (
            {"structure": replace(SEQUENCE, schedule="dualpipev", virtual_stages=3)},
            "schedule=dualpipev has two stages a rank, not virtual_stages=3",
        ),
        (
            {"structure": replace(SEQUENCE, virtual_stages=2)},
            "schedule=1f1b has one stage a rank, not virtual_stages",
        ),
        ({"structure": replace(SEQUENCE, virtual_stages=0)}, "virtual_stages=0 is not a whole number of at least 1"),
        ({"pp": 1, "structure": Structure(schedule="zbv")}, "schedule=zbv with virtual_stages=1 needs pp > 1"),
    ],
)
def test_each_rule_speaks(change, said):
    assert any(said in reason for reason in reasons(replace(GOOD, **change)))


def test_every_reason_at_once():
    found = reasons(Layout(dp_shard=5, cp=3, tp=7, pp=100, micro_batch_size=0, structure=SEQUENCE))
    assert len(found) == 6
    found = reasons(Layout(tp="x", pp=0, cp=1.5))
    assert len(found) == 3


def test_heads_without_groups_are_named_once():
    job = Job(seq_len=1024, global_batch_size=64)
    assert reasons(Layout(tp=7), 7, job, replace(GPT2, mlp=replace(GPT2.mlp, intermediate_size=7 * 9))) == [
        "tp=7 does not divide num_attention_heads=12"
    ]


def test_learned_positions_end_where_rotary_ones_do_not():
    job = Job(seq_len=2048, global_batch_size=64)
    assert reasons(Layout(), 1, job, GPT2) == [
        "seq_len=2048 exceeds max_position_embeddings=1024, and learned positions end there"
    ]
    assert reasons(Layout(), 1, Job(seq_len=2**18, global_batch_size=64)) == []


@pytest.mark.parametrize("job", [Job(10**12, 64), Job(8192, 10**15)])
def test_a_job_too_large_for_64_bits(job):
    assert any("too large to count" in reason for reason in reasons(Layout(), 1, job))


@pytest.mark.parametrize(("job", "said"), [(Job(0, 64), "seq_len=0"), (Job(8192, -1), "global_batch_size=-1")])
def test_a_job_of_nothing(job, said):
    assert any(said in reason for reason in reasons(Layout(), 1, job))


def test_sequence_parallel_is_inactive_at_tp_1():
    assert reasons(Layout(structure=SEQUENCE), 1, Job(8191, 64)) == []


def test_every_rule_has_a_name_of_its_own():
    names = [rule.why for rule in GENERAL]
    assert len(names) == len(set(names))


SIZE = st.integers(-1, 130)


@given(st.lists(st.fixed_dictionaries(dict.fromkeys((*AXES, "micro_batch_size"), SIZE)), min_size=1, max_size=8))
def test_many_layouts_at_once_are_refused_as_each_alone(rows):
    arrays = Layout(**{name: np.array([row[name] for row in rows]) for name in rows[0]}, structure=SEQUENCE)
    for rule in GENERAL:
        together = np.broadcast_to(rule.broken(LLAMA, JOB, of(64), arrays), len(rows))
        alone = [bool(rule.broken(LLAMA, JOB, of(64), Layout(**row, structure=SEQUENCE))) for row in rows]
        assert together.tolist() == alone, rule.why


@given(st.fixed_dictionaries(dict.fromkeys((*AXES, "micro_batch_size"), SIZE)))
def test_a_layout_without_reasons_divides_everything(row):
    layout = Layout(**row, structure=SEQUENCE)
    gpus = max(1, layout.world)
    if not reasons(layout, gpus):
        assert LLAMA.attention.num_key_value_heads % layout.tp == 0
        assert JOB.global_batch_size % (layout.micro_batch_size * layout.data_ranks) == 0
        assert JOB.seq_len % (layout.cp * layout.tp) == 0


def test_a_jobs_defaults():
    assert default_seq_len(131072) == 8192
    assert default_seq_len(1024) == 1024
    assert default_global_batch_size(8192) == default_global_batch_size(8192, gpus=64) == 512
    assert default_global_batch_size(8192, gpus=72) == 576  # of an NVL72, whose layouts divide no 512
    assert default_global_batch_size(8192, gpus=1000) == 512
    assert default_global_batch_size(2**30) == 1


@pytest.mark.parametrize("size", [None, float("nan"), 2.5, "2", True])
def test_a_size_that_is_none_is_one_reason_and_no_error(size):
    assert reasons(GOOD, job=replace(JOB, global_batch_size=size)) == [
        f"global_batch_size={size} is not a whole number"
    ]
    with pytest.raises(Refused) as refused:
        plan(GPT2, replace(JOB, global_batch_size=size, seq_len=size), cluster.load("1x8xh100-sxm"))
    assert refused.value.reasons == tuple(f"{n}={size} is not a whole number" for n in ("seq_len", "global_batch_size"))
    engines_own = [rule for rule in GENERAL if rule.why.startswith("tp does")]
    assert broken(engines_own, LLAMA, replace(JOB, seq_len=size), of(64), GOOD) == []  # said by GENERAL, once


@pytest.mark.parametrize("order", [("x", "pp", "dp_shard", "cp", "tp"), ("tp",), ()])
def test_a_rank_order_of_other_axes_is_one_reason(order):
    (said,) = reasons(replace(GOOD, rank_order=order))
    assert said.startswith("rank_order=")


def test_an_unknown_attention_kernel_is_refused():
    assert reasons(replace(GOOD, structure=replace(SEQUENCE, attention="x"))) == [
        "attention=x is not modelled (known: flash, eager)"
    ]


def test_a_precision_that_the_chip_does_not_have():
    v100 = cluster.load("8x8xv100-sxm-32gb")
    said = "v100-sxm-32gb states no peak for precision bf16; it has fp32, fp16"
    assert broken(GENERAL, LLAMA, JOB, v100, GOOD) == [said]
    assert broken(OF_JOB, LLAMA, JOB, v100, Layout()) == [said]
    assert broken(GENERAL, LLAMA, replace(JOB, precision="fp16"), v100, GOOD) == []


def test_rules_are_of_the_job_or_of_the_layout():
    assert {*OF_JOB, *OF_LAYOUT} == set(GENERAL)
    assert len(OF_JOB) + len(OF_LAYOUT) == len(GENERAL)
