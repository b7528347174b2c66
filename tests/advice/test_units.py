"""Parsing and formatting of rates and times."""

import pytest

from tf_dgc.advice import advise


@pytest.mark.parametrize(
    ("text", "bits"),
    [("1gbit", 1e9), ("100 Mbit/s", 1e8), ("2.5e3", 2500.0), (1e9, 1e9), ("7bit", 7.0)],
)
def test_parse_bits_per_second(text, bits):
    assert advise.parse_bits_per_second(text) == bits


@pytest.mark.parametrize(
    ("text", "seconds"), [("0.2ms", 2e-4), ("3us", 3e-6), (0, 0.0), ("2 s", 2.0)]
)
def test_parse_seconds(text, seconds):
    assert advise.parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("rate", ["1 gb", "fast", 0, -1.0, "inf", True, "1..2gbit"])
def test_wrong_rate_raises(rate):
    with pytest.raises(ValueError, match=r"`bandwidth` must be above 0.*1gbit"):
        advise.parse_bits_per_second(rate)


@pytest.mark.parametrize("time", ["1 minute", -1, "nan"])
def test_wrong_time_raises(time):
    with pytest.raises(ValueError, match=r"`latency` must be 0 or more.*0\.2ms"):
        advise.parse_seconds(time)


@pytest.mark.parametrize(
    ("bits", "text"),
    [
        (2.34e9, "2.3 Gbit/s"),
        (123.4e6, "123 Mbit/s"),
        (99.6e6, "100 Mbit/s"),
        (999.6e6, "1 Gbit/s"),
        (999.4e6, "999 Mbit/s"),
        (9e3, "9 kbit/s"),
        (3, "3 bit/s"),
    ],
)
def test_rate_text(bits, text):
    assert advise.rate_text(bits) == text
