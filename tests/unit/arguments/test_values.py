from __future__ import annotations

import pytest

from slime.arguments.flag import human_int, layout, nullable_str


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2),
        ("[0,1,1]", [0, 1, 1]),
        ("([0]*3+[1]*2)", [0, 0, 0, 1, 1]),
        ("128,0", [128, 0]),
        ("-1", -1),
        ("[1]*2", [1, 1]),
    ],
)
def test_layout(text, value):
    assert layout(text) == value


@pytest.mark.parametrize("text", ["abc", "[1", "__import__('os')", "[0]*[1]", "1.5", "[1]*999999999", "'a'*3"])
def test_layout_executes_nothing_and_refuses_the_rest(text):
    with pytest.raises(ValueError, match=r"."):
        layout(text)


@pytest.mark.parametrize(
    ("text", "value"), [("4096", 4096), ("20k", 20_000), ("25.6k", 25_600), ("128Ki", 131_072), ("1Mi", 1_048_576)]
)
def test_human_int(text, value):
    assert human_int(text) == value


@pytest.mark.parametrize("text", ["1.5Ki", "k", "12x", ""])
def test_human_int_refuses(text):
    with pytest.raises(ValueError, match=r"."):
        human_int(text)


def test_nullable_str():
    assert nullable_str("None") is None
    assert nullable_str("") is None
    assert nullable_str("x") == "x"
