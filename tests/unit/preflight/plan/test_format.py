"""Numbers, ranges and tables."""

from __future__ import annotations

import pytest

from slime.preflight.plan.format import bullets, count, span, table


def test_counts() -> None:
    assert [count(n, "sample") for n in (0, 1, 2, 1536000)] == [
        "0 samples",
        "1 sample",
        "2 samples",
        "1,536,000 samples",
    ]
    assert count(3, "micro-batch") == "3 micro-batches"
    assert count(2, "pass") == "2 passes"


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([5], "5"),
        (range(4), "0-3"),
        (range(6, 8), "6-7"),
        (range(0, 16, 4), "0, 4, 8, 12"),
        (range(0, 20, 4), "0, 4, .., 16"),
    ],
)
def test_spans(numbers: range, text: str) -> None:
    assert span(numbers) == text


def test_tables_align_numbers_to_the_right_and_wrap_the_last_column() -> None:
    lines = table(("name", "n", "what"), [("a", 7, "one two three four five"), ("bcdef", "1,000", "-")], width=34)
    assert lines == [
        "  name       n  what",
        "  a          7  one two three four",
        "                five",
        "  bcdef  1,000  -",
    ]


def test_bullets_keep_what_has_no_break() -> None:
    assert bullets(["--a-flag " + "x" * 150]) == ["  - --a-flag", "    " + "x" * 150]
