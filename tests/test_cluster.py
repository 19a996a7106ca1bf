import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanum import cluster
from nanum.cluster.parse import from_table
from nanum.cluster.presets import chips, presets
from nanum.cluster.tables import chip_names
from nanum.errors import Refused
from nanum.units import LARGEST, MIB

LAB = """
name = "lab"
nodes = 4
gpus_per_node = 8
chip = "h100-sxm"

[inter_node]
name = "InfiniBand NDR"
bandwidth = "200 Gb/s"
efficiency = { value = 90, unit = "%", tag = "measured", source = "nccl-tests all_gather, 8 GiB" }
latency = { value = 5, unit = "us", tag = "measured", source = "the same, 8 B" }
group_size = 32
"""
MINE = {
    "nodes": 1,
    "gpus_per_node": 2,
    "chip": {
        "name": "mine",
        "memory": "24 GiB",
        "memory_bandwidth": "1 TB/s",
        "multiprocessors": 128,
        "peak": {"bf16": "165 TFLOPS", "fp32": "82.6 TFLOPS"},
    },
    "intra_node": {"bandwidth": "32 GB/s", "efficiency": 0.8, "latency": "10 us", "group_size": 2},
}


def refusal(word):
    with pytest.raises(Refused) as refused:
        cluster.load(word)
    return refused.value.reasons


def quantities(loaded):
    chip = loaded.chip
    yield from chip.peak_flops_per_second.values()
    yield from chip.best_flops_per_second.values()
    yield from (chip.memory_bytes, chip.memory_bytes_per_second, chip.multiprocessors)
    yield loaded.host.memory_bytes_per_second
    for link in (loaded.intra_node, loaded.inter_node, loaded.host.link):
        yield from (link.bytes_per_second, link.efficiency, link.latency_seconds)


@pytest.mark.parametrize(
    "loaded", [*presets(), *(cluster.load(f"2x8x{name}") for name in chip_names())], ids=lambda c: c.name
)
def test_every_shipped_number_has_a_source_and_a_tag(loaded):
    for number in quantities(loaded):
        assert number.value > 0
        assert number.tag in ("datasheet", "measured", "assumed", "derived")
        assert len(number.source) > 5
    assert 0.5 < loaded.intra_node.efficiency.value < 1
    assert 0.5 < loaded.inter_node.efficiency.value < 1
    for dtype, best in loaded.chip.best_flops_per_second.items():
        assert best.value < loaded.chip.peak_flops_per_second[dtype].value


def test_a_superchip_reaches_its_host_faster_than_a_card_and_a_file_may_say_otherwise():
    card, superchip = (cluster.load(f"1x8x{chip}").host.link for chip in ("h100-sxm", "gb200"))
    assert (card.name, card.bytes_per_second.value) == ("PCIe 5 x16", 64e9)
    assert (superchip.name, superchip.bytes_per_second.value) == ("NVLink-C2C", 450e9)
    table = {"nodes": 1, "gpus_per_node": 8, "chip": "h100-sxm", "host": {"bandwidth": "20 GB/s"}}
    own = from_table(table, "lab", where="lab.toml").host
    assert own.link.bytes_per_second.value == 20e9
    assert own.memory_bytes_per_second == cluster.load("1x8xh100-sxm").host.memory_bytes_per_second


def test_a_chip_of_one_s_own_has_an_assumed_host_and_a_wrong_one_is_refused():
    assert from_table(MINE, "mine", where="mine.toml").host.link.bytes_per_second.tag == "assumed"
    wrong = {**MINE, "host": {"memory_bandwidth": "fast", "group_size": 8}}
    with pytest.raises(Refused) as refused:
        from_table(wrong, "mine", where="mine.toml")
    said = "\n".join(refused.value.reasons)
    assert "host.memory_bandwidth" in said
    assert "unknown key 'host.group_size'" in said


def test_the_contracts_chips_are_shipped():
    stated = "v100-sxm-32gb a100-sxm-40gb a100-sxm-80gb h100-sxm h200-sxm b200 gb200 gb300"
    assert set(stated.split()) <= set(chip_names())
    assert [chip.name for chip in chips()] == chip_names()


def test_nodes_gpus_and_chip():
    loaded = cluster.load("8X4xH100-SXM")
    assert (loaded.nodes, loaded.gpus_per_node, loaded.gpus) == (8, 4, 32)
    assert loaded.name == "8x4xh100-sxm"
    assert loaded.chip.memory_bytes.value == 81080 * MIB
    assert loaded.chip.peak_flops_per_second["bf16"].value == 989e12
    assert loaded.intra_node.bytes_per_second.value == 450e9
    assert loaded.inter_node.bytes_per_second.value == 50e9


def test_the_link_between_nodes_is_assumed_and_said_so():
    assumed = dict(cluster.load("8x8xh200-sxm").assumptions)
    (bandwidth,) = (value for what, value in assumed.items() if "between nodes" in what and "bandwidth" in what)
    assert (bandwidth.value, bandwidth.tag) == (50e9, "assumed")
    assert not [what for what, _ in cluster.load("1x8xh200-sxm").assumptions if "between nodes" in what]


def test_an_efficiency_is_assumed_beyond_the_group_it_was_measured_at():
    def assumed(word):
        return [what for what, _ in cluster.load(word).assumptions if "in a node" in what and "efficiency" in what]

    assert not assumed("1x8xb200")
    assert assumed("1x16xb200")


def test_an_h100_says_that_its_link_is_borrowed():
    assert cluster.load("1x8xh200-sxm").intra_node.efficiency.tag == "measured"
    borrowed = cluster.load("1x8xh100-sxm").intra_node.efficiency
    assert borrowed.tag == "assumed"
    assert "h200-sxm" in borrowed.source


@pytest.mark.parametrize("preset", presets(), ids=lambda preset: preset.name)
def test_a_preset_loads_by_name(preset):
    assert cluster.load(preset.name.upper()) == preset


def test_ten_million_gpus_are_few_enough():
    assert cluster.load("1250000x8xb200").gpus == LARGEST


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("0x8xh100-sxm", ["NODES = '0' must be at least 1"]),
        ("8x-8xh100-sxm", ["GPUS = '-8' must be at least 1"]),
        ("nanx8xh100-sxm", ["NODES = 'nan' is not a whole number"]),
        ("8x1.5xh100-sxm", ["GPUS = '1.5' is not a whole number"]),
        ("eightx8xh100-sxm", ["NODES = 'eight' is not a whole number"]),
        ("1250001x8xb200", ["10,000,008 GPUs, but at most 10,000,000"]),
        ("9" * 5000 + "x8xb200", ["must be at most 10,000,000"]),
        ("8x8xh100", ["unknown chip 'h100' (close: h100-sxm"]),
        ("0xnanxh1000", ["NODES", "GPUS", "unknown chip"]),
        ("dgx-h100", ["unknown cluster 'dgx-h100'"]),
        ("", ["unknown cluster ''"]),
        ("no-such.toml", ["no-such.toml: no such file"]),
        ("a\0b/c", ["no such file"]),
    ],
)
def test_a_word_that_names_no_cluster(word, said):
    reasons = refusal(word)
    assert len(reasons) == len(said)
    for reason, words in zip(reasons, said, strict=True):
        assert words in reason
        assert len(reason) < 350


def test_a_file(tmp_path):
    file = tmp_path / "lab.toml"
    file.write_text(LAB)
    loaded = cluster.load(str(file))
    assert (loaded.name, loaded.gpus, loaded.chip.name) == ("lab", 32, "h100-sxm")
    assert (loaded.inter_node.bytes_per_second.value, loaded.inter_node.bytes_per_second.tag) == (25e9, "assumed")
    assert str(file) in loaded.inter_node.bytes_per_second.source
    assert (loaded.inter_node.efficiency.value, loaded.inter_node.efficiency.tag) == (0.9, "measured")
    assert loaded.inter_node.latency_seconds.value == 5e-6
    assert loaded.intra_node == cluster.load("1x8xh100-sxm").intra_node


def test_a_chip_of_ones_own():
    loaded = from_table(MINE, "desk", where="desk.toml")
    assert (loaded.name, loaded.chip.name) == ("desk", "mine")
    assert loaded.chip.memory_bytes.value == 24 * 2**30
    assert loaded.chip.best_flops_per_second == {}
    with pytest.raises(Refused) as refused:
        from_table({key: value for key, value in MINE.items() if key != "intra_node"}, "desk", where="desk.toml")
    assert len(refused.value.reasons) == 4


def test_no_matmul_is_faster_than_its_chip():
    with pytest.raises(Refused) as refused:
        from_table(MINE | {"chip": MINE["chip"] | {"best": {"bf16": "20 PFLOPS"}}}, "desk", where="desk.toml")
    (reason,) = refused.value.reasons
    assert "chip.best.bf16 is more than chip.peak.bf16" in reason


def test_every_reason_at_once(tmp_path):
    file = tmp_path / "bad.toml"
    file.write_text("""
nodes = 0
gpus_per_node = "8"
chip = "h100"
colour = 3
[inter_node]
bandwith = "3 GB/s"
bandwidth = "400"
latency = { value = nan, unit = "us", tag = "guess" }
efficiency = 80
""")
    reasons = refusal(str(file))
    for said in (
        "nodes = 0 is not a whole number",
        "gpus_per_node = '8' is not a whole number",
        "unknown chip 'h100'",
        "unknown key 'colour'",
        "unknown key 'inter_node.bandwith' (did you mean bandwidth?)",
        "inter_node.bandwidth: '400' has no unit",
        "inter_node.latency: tag = 'guess' is not one of",
        "inter_node.efficiency: '80' is more than 2",
    ):
        assert sum(said in reason for reason in reasons) == 1, said
    assert len(reasons) == 8
    assert all(reason.startswith(f"{file}: ") for reason in reasons)


@pytest.mark.parametrize(
    ("bandwidth", "said"),
    [
        ('"0 GB/s"', "is zero"),
        ('"-1 GB/s"', "is negative"),
        ('{ value = nan, unit = "GB/s", tag = "measured", source = "s" }', "is not a number"),
        ('"1e300 B/s"', "is beyond any chip or link"),
        ('"1e-300 B/s"', "is nearly nothing"),
        ('{ value = inf, unit = "GB/s", tag = "measured", source = "s" }', "is infinite"),
        ('{ value = "fast", unit = "GB/s", tag = "measured", source = "s" }', "is not a number"),
        ('{ value = 1, unit = "GB/s", tag = "measured" }', "no source"),
        ('{ value = 1, unit = "GB/s", tag = "measured", source = "s", note = "n" }', "unknown key 'note'"),
        ("true", "true is not a quantity"),
        ("1979-05-27", "1979-05-27 is not a quantity"),
    ],
)
def test_a_number_that_is_none(tmp_path, bandwidth, said):
    file = tmp_path / "x.toml"
    file.write_text(f'nodes = 1\ngpus_per_node = 8\nchip = "b200"\n[inter_node]\nbandwidth = {bandwidth}\n')
    (reason,) = refusal(str(file))
    assert "inter_node.bandwidth" in reason
    assert said in reason


def test_a_link_of_one_s_own_is_not_filled_as_the_chip_s(tmp_path):
    """Neither by its messages, nor by a switch; and what an efficiency has of the switch is not had twice."""
    file = tmp_path / "own.toml"
    head = 'nodes = 1\ngpus_per_node = 8\nchip = "h200-sxm"\n[intra_node]\n'
    for own, ramp, switch in (
        ('latency = "3 us"\n', True, True),
        ('bandwidth = "450 GB/s"\n', True, True),
        ("efficiency = 0.9\n", True, False),
        ('bandwidth = "64 GB/s"\n', False, False),
    ):
        file.write_text(head + own)
        link = cluster.load(str(file)).intra_node
        assert (link.ramp is not None, bool(link.ramp and link.ramp.in_switch)) == (ramp, switch), own


def test_launches_that_block_are_stated(tmp_path):
    file = tmp_path / "slow.toml"
    text = 'nodes = 1\ngpus_per_node = 8\nchip = "a100-sxm-80gb"\n'
    file.write_text(text + "launch_blocking = true\n")
    assert cluster.load(str(file)).launch_blocking
    file.write_text(text + 'launch_blocking = "yes"\n')
    (reason,) = refusal(str(file))
    assert reason.endswith("launch_blocking = 'yes' is neither true nor false")


def test_a_file_that_is_no_toml(tmp_path):
    file = tmp_path / "x.toml"
    file.write_text("nodes = ")
    assert "not TOML" in refusal(str(file))[0]


def test_tables_names_and_long_numbers_are_refused_in_the_users_words(tmp_path):
    file = tmp_path / "mine.toml"
    head = 'gpus_per_node = 8\nchip = "h100-sxm"\n'
    for text, said in (
        ("nodes = 1\ninter_node = [1]\n", "inter_node = [1] is not a table"),
        ("nodes = 1\nname = 3\n", "name = 3 is not text"),
        ('nodes = 1\nname = "a\\u001b[31m"\n', "name: 'a\\x1b[31m' has characters that cannot be printed"),
        (f"nodes = 1{'0' * 6000}\n", "not TOML (a number is too long)"),
        (f"nodes = 1{'0' * 300}\n", "… is not a whole number from 1 to 10,000,000"),
    ):
        file.write_text(head + text)
        with pytest.raises(Refused) as refused:
            cluster.load(str(file))
        (reason,) = refused.value.reasons
        assert said in reason


def test_a_refused_word_waits_for_no_pydantic():
    code = (
        "import sys; from nanum import cluster\ntry: cluster.load('0x8xh100')\nexcept ValueError: pass\n"
        "sys.exit('pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@given(st.integers(-3, 10**8), st.integers(-3, 10**4))
def test_sizes_are_loaded_or_refused(nodes, gpus_per_node):
    try:
        loaded = cluster.load(f"{nodes}x{gpus_per_node}xh100-sxm")
    except Refused:
        assert nodes < 1 or gpus_per_node < 1 or nodes * gpus_per_node > LARGEST
    else:
        assert loaded.gpus == nodes * gpus_per_node <= LARGEST


def test_one_number_before_a_chip_is_read_as_one_node():
    with pytest.raises(Refused, match="1x8xh100-sxm is one node of 8 GPUs"):
        cluster.load("8xh100-sxm")
