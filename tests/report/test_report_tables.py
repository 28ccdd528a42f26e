from __future__ import annotations

import math
from html.parser import HTMLParser

import numpy as np
import pytest

from fedpact.core.errors import UnknownName
from fedpact.report import format_value, html_table, text_table

ROWS = [
    {"run": "FedEPM", "objective": 0.3331, "bytes": 1234567, "note": "a|b"},
    {"run": "SFedAvg <b>", "objective": 0.335461, "bytes": None, "note": "c\nd"},
    {"run": "x", "objective": math.nan, "bytes": 12},
]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (math.nan, "–"),
        (np.float32("nan"), "–"),
        (math.inf, "∞"),
        (-math.inf, "-∞"),
        (True, "yes"),
        (np.False_, "no"),
        (0, "0"),
        (0.0, "0"),
        (-0.0, "0"),
        (1234567, "1,234,567"),
        (np.int64(-1234), "-1,234"),
        (0.5, "0.5"),
        (1 / 3, "0.33333"),
        (-1 / 3, "-0.33333"),
        (0.0001, "0.0001"),
        (0.00001234567, "1.2346e-5"),
        (100.0, "100"),
        (1234.56, "1,234.6"),
        (123456.7, "123,457"),
        (999_999.7, "1e6"),
        (12345678.5, "1.2346e7"),
        (3e6, "3,000,000"),
        (1e20, "1e20"),
        (np.array(2.5), "2.5"),
        ([1, 0.5, None], "1, 0.5, –"),
        ({"a": 1}, "a = 1"),
        ("words", "words"),
    ],
)
def test_format_value(value, shown):
    assert format_value(value) == shown


@pytest.mark.parametrize("value", [0.00012345678, 0.98765432, 9.9999999, 12345.678, 987654.3])
def test_a_float_keeps_at_least_four_significant_digits(value):
    assert float(format_value(value).replace(",", "")) == pytest.approx(value, rel=5e-5)


def test_text_table_by_hand():
    assert text_table(ROWS[:2], ["run", "objective", "bytes"]).splitlines() == [
        "run          objective      bytes",
        "───────────  ─────────  ─────────",
        "FedEPM         0.33310  1,234,567",
        "SFedAvg <b>    0.33546          –",
    ]


def test_text_table_takes_all_keys_in_order_and_shows_what_is_missing():
    lines = text_table(ROWS).splitlines()
    assert lines[0].split() == ["run", "objective", "bytes", "note"]
    assert lines[3].endswith("c d")  # one line per row
    assert lines[4].split() == ["x", "–", "12", "–"]


def test_wide_characters_count_twice():
    lines = text_table([{"a": "联邦", "b": 1}, {"a": "abcd", "b": 2}]).splitlines()
    assert lines[2] == "联邦  1"
    assert lines[3] == "abcd  2"


def test_headings_can_be_given():
    assert text_table(ROWS, {"bytes": "sent", "run": "name"}).split()[:2] == ["sent", "name"]


@pytest.mark.parametrize("table", [text_table, html_table])
def test_an_unknown_column_is_named(table):
    with pytest.raises(UnknownName, match=r"'objectiv'.*Did you mean 'objective'"):
        table(ROWS, ["run", "objectiv"])
    assert "no rows" in table([])


def test_html_table_escapes_every_part():
    class Texts(HTMLParser):
        def __init__(self):
            super().__init__()
            self.tags, self.texts = [], []

        def handle_starttag(self, tag, attrs):
            self.tags.append(tag)

        def handle_data(self, data):
            self.texts.append(data)

    text = html_table([{"<i>head</i>": "<script>x</script>"}], label='"><img>')
    parser = Texts()
    parser.feed(text)
    assert set(parser.tags) == {"div", "table", "thead", "tbody", "tr", "th", "td"}
    assert {"<i>head</i>", "<script>x</script>"} <= set(parser.texts)
