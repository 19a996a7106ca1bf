"""Logs of nccl-tests, in the forms that its versions print, and what they say of a cluster."""

# ruff: noqa: E501, W291 - lines as nccl-tests prints them

from dataclasses import replace

import pytest

from nanum.account.cost import Cost
from nanum.account.exchanges import modelled
from nanum.cluster import load
from nanum.collectives import wire_bytes
from nanum.errors import Refused
from nanum.layout import Layout
from nanum.measure import from_nccl_tests, nccl_tests, save
from nanum.program import DATA_STREAM, Collective

# Printed by nccl-tests 2.13 and later.
HEAD = """\
# nThread 1 nGpus 1 minBytes 8 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
"""
COLUMNS = """\
#
#                                                              out-of-place                       in-place          
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)       
"""
TAIL = """\
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 70.742 
#
"""


def rank(i, per_node, group=0):
    return f"#  Rank {i:2} Group {group:2} Pid {6899 + i:6} on node-{i // per_node} device {i % per_node:2} [0x04] NVIDIA H100 80GB HBM3\n"


def row(size, us, again=None, redop="sum", wrong="0"):
    again = us if again is None else again
    one, two = (f"{us:8.2f} {size / us / 1e3:7.2f} {size / us / 1e3:7.2f}" for us in (us, again))
    return f"{size:12} {size // 4:13}     float {redop:>7}      -1 {one}      {wrong} {two}    N/A\n"


def log(ranks, per_node, rows, title=""):
    return title + HEAD + "".join(rank(i, per_node) for i in range(ranks)) + COLUMNS + "".join(rows) + TAIL


SIZES = [1024, 1048576, 1073741824]
NEW = "# Collective test starting: all_reduce_perf\n"


def one(text, name="a.log"):
    (run,), wrong = nccl_tests.parse(text, name)
    assert wrong == []
    return run


def test_a_run_of_two_nodes():
    run = one(log(16, 8, [row(1024, 120.0, 118.0), row(2**30, 6759.0)], NEW))
    assert (run.kind, run.ranks, run.nodes, run.repeats) == ("all_reduce", 16, 2, 20)
    assert run.device == "NVIDIA H100 80GB HBM3"
    assert dict(run.seconds) == {1024: [120e-6, 118e-6], 2**30: [pytest.approx(6759e-6)] * 2}


def test_the_form_before_2_13():
    """Without groups and roots, the last column called error, the rank's line without its bus."""
    text = (
        "# nThread 1 nGpus 1 minBytes 8 maxBytes 8 step: 1048576(bytes) warmup iters: 5 iters: 20 validation: 1 \n#\n"
        "# Using devices\n"
        "#   Rank  0 Pid   1320 on ip-172-31-20-228 device  0 [0x00] Tesla V100-SXM2-16GB\n"
        "#   Rank  1 Pid   2066 on ip-172-31-22-230 device  0 [0x00] Tesla V100-SXM2-16GB\n#\n"
        "#                                                     out-of-place                       in-place          \n"
        "#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error\n"
        "#        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)       \n"
        "     1048576        262144   float     sum    100.0   10.49   10.49  2e-07    110.0    9.53    9.53  1e-07\n"
    )
    run = one(text, "all_reduce_perf.log")
    assert (run.kind, run.ranks, run.nodes) == ("all_reduce", 2, 2)
    assert run.seconds[1048576] == [100e-6, 110e-6]


@pytest.mark.parametrize(
    ("title", "name", "kind"),
    [
        ("# Collective test starting: alltoall_perf\n", "a.log", "all_to_all"),
        ("$ mpirun -np 8 ./build/reduce_scatter_perf -b 8 -e 1G -f 2 -g 1\n", "a.log", "reduce_scatter"),
        ("", "sendrecv_perf-8.txt", "send"),
        ("", "all-gather.log", "all_gather"),
        ("# Collective test starting: all_gather_perf\n", "all_reduce.log", "all_gather"),
    ],
)
def test_which_test_it_was(title, name, kind):
    assert one(log(8, 8, [row(1024, 20.0)], title), name).kind == kind


def test_lines_tagged_by_mpirun():
    tagged = "".join(f"[1,0]<stdout>:{line}\n" for line in log(8, 8, [row(1024, 20.0)], NEW).splitlines())
    assert one(tagged).seconds == {1024: [20e-6, 20e-6]}


def test_several_runs_in_one_file():
    text = log(8, 8, [row(1024, 20.0)], NEW) + log(
        16, 8, [row(1024, 60.0, redop="none")], "# Collective test starting: all_gather_perf\n"
    )
    runs, wrong = nccl_tests.parse(text, "a.log")
    assert not wrong
    assert [(run.kind, run.ranks) for run in runs] == [("all_reduce", 8), ("all_gather", 16)]


def test_a_run_split_into_groups_has_the_ranks_of_one():
    text = NEW + HEAD + "".join(rank(i % 8, 8, group=i // 8) for i in range(16)) + COLUMNS + row(1024, 20.0)
    run = one(text)
    assert (run.ranks, run.nodes) == (8, 1)


def test_no_time_in_place():
    line = "        1024           256     float    none      -1    20.00    0.05    0.04      0      N/A     N/A     N/A    N/A\n"
    assert one(log(8, 8, [line], NEW)).seconds == {1024: [20e-6]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1: not a log of nccl-tests"),
        ("hello\nworld\n", "line 1: not a log of nccl-tests"),
        (log(8, 8, [row(1024, 20.0)]), "line 1: which test it is, is not said: put its name into the file's"),
        (log(8, 8, [], NEW), "line 2: a run without a row of times"),
        (NEW + HEAD + COLUMNS + row(1024, 20.0), "line 2: a run without '#  Rank' lines"),
        (log(1, 8, [row(1024, 20.0)], NEW), "line 2: a run of one rank, which exchanges nothing"),
        (log(8, 8, [row(1024, 20.0, wrong="3")], NEW), "line 17: 3 results were wrong"),
        (log(8, 8, [row(1024, 20.0)[:-8] + "\n"], NEW), "line 17: 12 values for 13 columns"),
        (log(8, 8, [row(1024, 20.0).replace("20.00", "20.0x", 1)], NEW), "line 17: '20.0x 0.05 0.05' is not a time"),
        (log(8, 8, [row(2**30, 9999.0).replace("9999.00", "  99.99", 1)], NEW), "bytes in 99.99 us are not"),
        (NEW + HEAD + rank(0, 8) * 2 + COLUMNS + row(1024, 20.0), "line 6: rank 0 for the second time"),
        (log(8, 8, [row(1024, 20.0)], NEW).replace("(us)", "(ms)"), "line 16: times are not in microseconds"),
        (NEW + HEAD + rank(0, 8) + rank(1, 8) + row(1024, 20.0), "line 7: a row before the line that names"),
    ],
)
def test_what_is_no_log_is_refused_by_line(text, said):
    _, wrong = nccl_tests.parse(text, "a.log")
    assert said in wrong[0]


def test_every_file_s_reasons_at_once(tmp_path):
    (tmp_path / "a.log").write_text("nothing")
    with pytest.raises(Refused) as refused:
        nccl_tests.read([tmp_path / "a.log", tmp_path / "b.log"])
    assert [reason.split(": ")[0] for reason in refused.value.reasons] == [
        str(tmp_path / n) for n in ("a.log", "b.log")
    ]


def exchange(kind, axis, size, payload, calls=1):
    return Collective(kind, (axis,), "forward", "params", "bf16", size, calls, payload, wire_bytes(kind, payload, size))


@pytest.fixture
def logs(tmp_path):
    """An all-reduce in a node, and an all-gather across two."""
    within = [row(size, 20 + size * 1.75 / 340e3) for size in SIZES]
    across = [row(size, 60 + size * 0.9375 / 320e3, redop="none") for size in SIZES]
    (tmp_path / "all_reduce_perf.log").write_text(log(8, 8, within))
    (tmp_path / "all_gather_perf.log").write_text(log(16, 8, across))
    return sorted(tmp_path.glob("*.log"))


def test_a_cluster_costs_what_its_logs_measured(logs):
    cluster = from_nccl_tests(logs, load("1x1xh100-sxm"), "lab", sized=False)
    assert (cluster.nodes, cluster.gpus_per_node, cluster.name) == (2, 8, "lab")
    inside, across = Cost(cluster, Layout(dp_shard=2, tp=8)), Cost(cluster, Layout(dp_shard=16))
    for size in SIZES:
        got = inside.collective_seconds(exchange("all_reduce", "tp", 8, size))
        assert got == pytest.approx(20e-6 + size * 1.75 / 340e9, rel=1e-3)
        got = across.collective_seconds(exchange("all_gather", "dp_shard", 16, size))
        assert got == pytest.approx(60e-6 + size * 0.9375 / 320e9, rel=1e-3)
    ten = inside.collective_seconds(exchange("all_reduce", "tp", 8, 10 * SIZES[1], calls=10))
    assert ten == pytest.approx(10 * inside.collective_seconds(exchange("all_reduce", "tp", 8, SIZES[1])))


def test_links_take_their_efficiency_from_the_logs(logs):
    base = load("1x1xh100-sxm")
    cluster = from_nccl_tests(logs, base, "lab", sized=False)
    inner, outer = cluster.intra_node, cluster.inter_node
    assert inner.bytes_per_second == base.intra_node.bytes_per_second
    assert inner.efficiency.value == pytest.approx(340 / 450, rel=0.01)
    assert inner.latency_seconds.value == pytest.approx(20e-6 / 14, rel=0.01)
    assert (inner.group_size, outer.group_size) == (8, 16)
    # a gather goes round one ring of all ranks: each GPU of a node sends an eighth of what leaves it, 15/16 of the whole
    assert outer.efficiency.value == pytest.approx(320 / 8 / 50, rel=0.02)
    assert outer.latency_seconds.value == pytest.approx(60e-6 - 14 * inner.latency_seconds.value, rel=0.01)
    assert {link.efficiency.tag for link in (inner, outer)} == {"measured"}
    assert "all_reduce_perf.log: 8 ranks on 1 node, NVIDIA H100" in inner.efficiency.source


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize(("ranks", "per_node"), [(8, 8), (16, 8), (32, 4)])
def test_by_its_links_the_model_takes_what_was_measured(kind, ranks, per_node, tmp_path):
    """With nothing else of the exchanges: what was not measured goes by the links alone."""
    base = load(f"{ranks // per_node}x{per_node}xh100-sxm")
    plain = replace(base, **{tier: replace(getattr(base, tier), ramp=None) for tier in ("intra_node", "inter_node")})
    payloads = (2**10, 2**33)
    took = [1.7 * modelled(plain, kind, payload, 1, per_node, base.nodes, ranks) for payload in payloads]
    rows = [row(payload, float(seconds) * 1e6) for payload, seconds in zip(payloads, took, strict=True)]
    (tmp_path / f"{kind}_perf.log").write_text(log(ranks, per_node, rows))
    told = from_nccl_tests([tmp_path / f"{kind}_perf.log"], plain, "lab", sized=True)
    again = [modelled(told, kind, payload, 1, per_node, base.nodes, ranks) for payload in payloads]
    assert again == pytest.approx(took, rel=0.02)


def test_a_link_that_no_message_tells_stays_as_it_was(tmp_path):
    """`all_reduce_perf` alone sends 32 MiB: all of its time is the link's bandwidth, and none its latency's."""
    base = load("1x8xh100-sxm")
    for rows, kept in (([row(2**25, 200.0)], "latency_seconds"), ([row(8, 136.0), row(16, 137.0)], "efficiency")):
        (tmp_path / "all_reduce_perf.log").write_text(log(8, 8, rows))
        told = from_nccl_tests([tmp_path / "all_reduce_perf.log"], base, "lab", sized=True).intra_node
        changed = {
            name for name in ("latency_seconds", "efficiency") if getattr(told, name) != getattr(base.intra_node, name)
        }
        assert changed == {"latency_seconds", "efficiency"} - {kept}


def test_a_log_may_have_any_name(tmp_path):
    """A cluster's file holds where its numbers are from, and is refused where that cannot be printed."""
    names = [f"{'long ' * 40}{i} \t\x1b[31m all_reduce_perf.log" for i in range(9)]
    for name in names:
        (tmp_path / name).write_text(log(8, 8, [row(1024, 20.0), row(2**30, 5000.0)]))
    told = from_nccl_tests(sorted(tmp_path.iterdir()), load("1x8xh100-sxm"), "lab", sized=True)
    save(told, tmp_path / "lab.toml", force=False)
    assert load(str(tmp_path / "lab.toml")).measured.exchanges == told.measured.exchanges


def test_times_that_are_the_same_make_a_file_that_is_read(tmp_path):
    """In and out of place to the digit: 300.35 us is no binary number, and no time of it is beside another."""
    (tmp_path / "all_reduce_perf.log").write_text(log(8, 8, [row(1024, 300.35), row(2**30, 5000.07)]))
    told = from_nccl_tests([tmp_path / "all_reduce_perf.log"], load("1x8xh100-sxm"), "lab", sized=True)
    save(told, tmp_path / "lab.toml", force=False)
    (read,) = load(str(tmp_path / "lab.toml")).measured.exchanges
    assert read.grid.low_seconds == read.grid.seconds == read.grid.high_seconds


@pytest.mark.parametrize(
    ("chip", "kind", "bus", "efficiency"),
    [
        ("h100-sxm", "all_reduce", 470.0, 470 / 450 / 1.294),  # in the switch, by ramps.toml
        ("h100-sxm", "all_reduce", 360.0, 360 / 450),  # around a ring
        ("h100-sxm", "all_gather", 360.0, 360 / 450),
        ("a100-sxm-80gb", "all_reduce", 310.0, 1.0),  # its switch adds nothing that is known, but a ring is no faster
    ],
)
def test_what_a_switch_adds_up_is_no_ring_s(chip, kind, bus, efficiency, tmp_path):
    per_byte = 1.75 if kind == "all_reduce" else 0.875
    file = tmp_path / f"{kind}_perf.log"
    file.write_text(log(8, 8, [row(2**33, 2**33 * per_byte / bus / 1e3)]))
    base = load(f"1x8x{chip}")
    told = from_nccl_tests([file], base, "lab", sized=True)
    assert told.intra_node.efficiency.value == pytest.approx(efficiency, rel=1e-3)
    again = from_nccl_tests([file], told, "lab", sized=True)  # and read once more it is the same
    assert again.intra_node.efficiency == told.intra_node.efficiency


def test_logs_of_another_chip_are_refused(tmp_path):
    """Unless the cluster is said whole: then its links are taken to be theirs."""
    file = tmp_path / "all_reduce_perf.log"
    file.write_text(log(8, 8, [row(2**30, 5000.0)]))
    with pytest.raises(
        Refused, match="the logs are of NVIDIA H100 80GB HBM3, and --chip is a100-sxm-80gb: --chip h100-sxm"
    ):
        from_nccl_tests([file], load("1x1xa100-sxm-80gb"), "lab", sized=False)
    assert from_nccl_tests([file], load("1x8xh200-sxm"), "lab", sized=True).measured.exchanges


@pytest.mark.parametrize(
    ("device", "chip", "others"),
    [
        ("NVIDIA A100-SXM4-80GB", "h100-sxm", ["a100-sxm-40gb", "a100-sxm-80gb"]),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb", []),
        ("NVIDIA GB200", "b200", ["gb200"]),
        ("NVIDIA GB200", "gb200", []),
        ("Tesla V100-SXM2-32GB", "v100-sxm-32gb", []),
        ("NVIDIA L40S", "h100-sxm", []),  # no chip that is known: who asks knows
        ("", "h100-sxm", []),
    ],
)
def test_which_chip_a_device_s_name_names(device, chip, others):
    assert nccl_tests.other_chips(device, chip) == others


def test_an_exchange_faster_than_its_link_is_told_in_the_log_s_words(tmp_path):
    file = tmp_path / "all_gather_perf.log"
    file.write_text(log(16, 8, [row(2**30, 2**30 / 1200e3, redop="none")]))
    with pytest.raises(Refused, match=r"largest all_gather of .* times the 50\.0 GB/s that network is taken to have"):
        from_nccl_tests([file], load("2x8xh100-sxm"), "lab", sized=True)


def test_exchanges_timed_alone_do_not_say_what_compute_loses_beside_them(logs):
    base = load("2x8xh100-sxm")
    lab = from_nccl_tests(logs, base, "lab", sized=True)
    gather = replace(exchange("all_gather", "dp_shard", 16, SIZES[-1]), stream=DATA_STREAM)
    shares = []
    for cluster in (base, lab):
        cost = Cost(cluster, Layout(dp_shard=16))
        shares.append(cost.stolen_seconds(gather) / cost.collective_seconds(gather))
        assert "compute lost beside an exchange" in {each["what"] for each in cost.assumptions()}
    assert shares[0] == pytest.approx(shares[1])
    assert shares[0] > 0


def test_a_base_with_sizes_keeps_them(logs):
    cluster = from_nccl_tests(logs, load("64x8xh100-sxm"), "lab", sized=True)
    assert (cluster.nodes, cluster.gpus_per_node) == (64, 8)


def test_beyond_the_measured_ranks_the_model_goes_on_from_the_nearest(logs):
    cluster = from_nccl_tests(logs, load("4x8xh100-sxm"), "lab", sized=True)
    payload = SIZES[-1]
    two, four = (
        Cost(cluster, Layout(dp_shard=n)).collective_seconds(exchange("all_gather", "dp_shard", n, payload))
        for n in (16, 32)
    )
    plain = [modelled(cluster, "all_gather", payload, 1, 8, nodes, 8 * nodes) for nodes in (2, 4)]
    assert four / two == pytest.approx(plain[1] / plain[0])
    assert two != pytest.approx(plain[0], rel=0.01)  # or there would be nothing to put right


def test_several_logs_of_one_test_are_put_together(tmp_path):
    for name, us in (("a", 20.0), ("b", 30.0), ("c", 90.0)):
        (tmp_path / f"{name}_all_reduce.log").write_text(log(8, 8, [row(1024, us)]))
    (only,) = nccl_tests.read(sorted(tmp_path.glob("*.log"))).exchanges
    grid = only.grid
    assert (grid.low_seconds[0], grid.seconds[0], grid.high_seconds[0]) == pytest.approx((20e-6, 30e-6, 90e-6))
    assert grid.repeats == 60
