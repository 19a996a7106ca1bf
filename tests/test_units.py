import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanum import units


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("400 Gb/s", "bytes_per_second", 50e9),
        ("400Gbps", "bytes_per_second", 50e9),
        ("100 Gbit/s", "bytes_per_second", 12.5e9),
        ("900 GB/s", "bytes_per_second", 900e9),
        ("3.35TB/s", "bytes_per_second", 3.35e12),
        ("80GiB", "bytes", 80 * 2**30),
        ("80 GB", "bytes", 80 * 10**9),
        ("81,559 MiB", "bytes", 81559 * 2**20),
        ("989 TFLOPS", "flops_per_second", 989e12),
        ("1.5 PFLOP/s", "flops_per_second", 1.5e15),
        ("5.77 us", "seconds", 5.77e-6),
        ("5.77 µs", "seconds", 5.77e-6),
        ("80 %", "ratio", 0.8),
        ("0.8", "ratio", 0.8),
        ("132", "count", 132),
        ("1e3 ms", "seconds", 1.0),
        ("1 min 16 s", "seconds", 76),
        ("2h05min", "seconds", 7500),
        ("12 d 04 h", "seconds", 1_051_200),
        ("1,000 d", "seconds", 86_400_000),
    ],
)
def test_parse(text, dimension, value):
    assert units.parse(text, dimension) == value


@pytest.mark.parametrize(
    ("text", "dimension", "said"),
    [
        ("3,2 s", "seconds", "a comma groups three digits"),
        ("450,50 GB/s", "bytes_per_second", "a comma groups three digits"),
        ("81,5590 MiB", "bytes", "a comma groups three digits"),
        ("1,5 min", "seconds", "a comma groups three digits"),
        ("16 s 1 min", "seconds", "has the unit"),
        ("1 min 16", "seconds", "has the unit"),
        ("min", "seconds", "is not a quantity"),
        ("1_0 s", "seconds", "is not a quantity|has the unit"),
        ("nan s", "seconds", "is not a number"),
        ("inf GB", "bytes", "is infinite"),
        ("1e400 s", "seconds", "is infinite"),
        ("1e308 TFLOPS", "flops_per_second", "is infinite"),
        ("-3 us", "seconds", "is negative"),
        ("80", "bytes", "has no unit"),
        ("5 GB", "seconds", "has the unit 'GB'"),
        ("400 GiB", "bytes_per_second", "has the unit 'GiB'"),
        ("fast", "bytes_per_second", "is not a quantity"),
        ("", "bytes", "is not a quantity"),
    ],
)
def test_parse_refuses(text, dimension, said):
    with pytest.raises(ValueError, match=said):
        units.parse(text, dimension)


def test_a_bit_is_an_eighth_of_a_byte():
    assert units.parse("8 Gb/s", "bytes_per_second") == units.parse("1 GB/s", "bytes_per_second")


def test_a_whole_number_beyond_floats_is_infinite():
    with pytest.raises(ValueError, match="infinite"):
        units.scaled(10**400, "GB", "bytes")


@pytest.mark.parametrize(
    ("printed", "text"),
    [
        (units.format_bytes(13.2e9), "12.3 GiB"),
        (units.format_bytes(81559 * units.MIB), "79.6 GiB"),
        (units.format_bytes(1023), "1,023 B"),
        (units.format_bytes(0), "0 B"),
        (units.format_bytes(math.inf), "infinite"),
        (units.format_decimal_bytes(28e9), "28.0 GB"),
        (units.format_decimal_bytes(4_294_967_296), "4.29 GB"),
        (units.format_decimal_bytes(67_108_864), "67.1 MB"),
        (units.format_decimal_bytes(999.9e6), "1.00 GB"),
        (units.format_rate(450e9), "450 GB/s"),
        (units.format_flops_per_second(989e12), "989 TFLOPS"),
        (units.format_seconds(3.13e-6), "3.13 µs"),
        (units.format_seconds(0.99999e-3), "1.00 ms"),
        (units.format_seconds(5.213), "5.21 s"),
        (units.format_seconds(59.999), "1 min 00 s"),
        (units.format_seconds(125), "2 min 05 s"),
        (units.format_seconds(3599.9), "1 h 00 min"),
        (units.format_seconds(86399), "1 d 00 h"),
        (units.format_seconds(math.nan), "unknown"),
        (units.format_seconds_between(0.712, 0.893), "712–893 ms"),
        (units.format_seconds_between(0.93, 1.1), "0.93–1.10 s"),
        (units.format_seconds_between(58.9, 74.1), "58.9–74.1 s"),
        (units.format_seconds_between(540, 660), "9.00–11.0 min"),
        (units.format_seconds_between(1.0, math.inf), "1.00 s–infinite"),
        (units.format_short_count(70_553_706_496), "70.6 B"),
        (units.format_short_count(124), "124"),
    ],
)
def test_print(printed, text):
    assert printed == text


@given(st.floats(1, 1e18))
def test_memory_reads_back_as_printed(n):
    assert units.parse(units.format_bytes(n), "bytes") == pytest.approx(n, rel=0.006, abs=0.5)


@given(st.floats(1e-9, 59) | st.floats(59, 3e8))
def test_durations_read_back_as_printed(seconds):
    within = 0.021  # half an hour of a day
    assert units.parse(units.format_seconds(seconds), "seconds") == pytest.approx(seconds, rel=within)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("7.5", "is not a whole number"),
        ("nan", "is not a whole number"),
        ("", "is not a whole number"),
        ("٣", "is not a whole number"),
        ("0", "must be at least 1"),
        ("-3", "must be at least 1"),
        ("10000001", "must be at most 10,000,000"),
        ("9" * 5000, "must be at most 10,000,000"),
    ],
)
def test_a_whole_number_that_is_none(text, reason):
    with pytest.raises(ValueError, match=f"^{reason}$"):
        units.whole_number(text)


@pytest.mark.parametrize("text", ["0", "00", "-0", "+0"])
def test_none_is_a_whole_number_where_it_may_be(text):
    assert units.whole_number(text, 0) == 0


@given(st.integers(1, units.LARGEST), st.sampled_from(["{}", "+{}", " {} ", "{:05000d}"]))
def test_a_whole_number_is_read(number, written):
    assert units.whole_number(written.format(number)) == number


@given(st.one_of(st.text(), st.integers().map(str), st.floats().map(str)))
def test_any_text_is_a_whole_number_or_refused(text):
    try:
        number = units.whole_number(text)
    except ValueError:
        assert not re.fullmatch(r"\s*\+?0*[1-9][0-9]{,6}\s*", text)
    else:
        assert 1 <= number <= units.LARGEST
        assert number == int(text)
