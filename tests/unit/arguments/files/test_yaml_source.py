"""The reader of all YAML files: lines, numbers, and what it says of files that are no YAML."""

from __future__ import annotations

import json
import math

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime.arguments import ArgumentError
from slime.arguments.files import yaml_source


def read(path):
    return yaml_source.read(path, "--file")


SYNTAX = [
    ("", "the file is empty; expected `name: value` lines"),
    ("# only a comment\n", "the file is empty; expected `name: value` lines"),
    ("- a\n- b\n", "line 1: expected `name: value` lines, got a list"),
    ("\nhello\n", "line 2: expected `name: value` lines, got the text 'hello'"),
    ("a:1\n", "line 1: expected `name: value` lines, got the text 'a:1'; a colon needs a space behind it"),
    ("a:\n\tb: 1\n", "line 2: the line is indented with a tab; YAML wants spaces: 'b: 1'"),
    ("a: 1\n\tb: 2\n", "line 2: the line is indented with a tab; YAML wants spaces: 'b: 2'"),
    (
        "a:\n  b: 1\n   c: 2\n",
        "line 3: the line does not fit the one above: wrong indentation, a colon missing above, or a text with a colon "
        "that has no quotes: 'c: 2'",
    ),
    ("a:\n  b: 1\n c: 2\n", "line 3: the indentation does not fit the lines above: 'c: 2'"),
    ("- name: x\n path: y\n", "line 2: the indentation does not fit the lines above: 'path: y'"),
    ("a: 1\nb 2\nc: 3\n", "line 2: expected `name: value`, with a colon and a space: 'b 2'"),
    (
        "x: 0\na: [1,2\nb: 3\n",
        "line 2: the `[` that opens here is not closed, or a comma is missing behind it: 'a: [1,2'",
    ),
    (
        "x: 0\na: {b: 1\nc: 2\n",
        "line 2: the `{` that opens here is not closed, or a comma is missing behind it: 'a: {b: 1'",
    ),
    ("x: 0\na: 'y\nb: 1\n", 'line 2: the quote that opens here is not closed: "a: \'y"'),
    ("a: @x\n", "line 1: a text that starts with this character needs quotes: 'a: @x'"),
    ("a: !!python/object:os.system x\n", "line 1: only plain values may stand here: 'a: !!python/object:os.system x'"),
    ("a: 1\n---\nb: 2\n", "line 2: a second document starts here (`---`); a file has one: '---'"),
    ("a: &x [*x]\n", "this is no YAML: line 1 contains itself"),
]


@pytest.mark.parametrize(("text", "message"), SYNTAX, ids=[repr(text) for text, _ in SYNTAX])
def test_what_is_no_yaml(mistakes, text, message):
    assert mistakes(read, "--file", text) == [message]


def test_every_key_that_is_given_twice(mistakes):
    assert mistakes(read, "--file", "a: 1\nb: 2\na: 3\nc:\n- d: 1\n  d: 2\n") == [
        "line 3, a: the key is given already on line 1; keep one",
        "line 6, c[0].d: the key is given already on line 5; keep one",
    ]


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ArgumentError, match=r"--file .*/none: there is no such file"):
        read(str(tmp_path / "none"))
    with pytest.raises(ArgumentError, match=r"--file .*: this is a directory"):
        read(str(tmp_path))
    (tmp_path / "binary").write_bytes(b"a: \xff\xfe")
    with pytest.raises(ArgumentError, match=r"--file .*/binary: this is no text file \(byte 3 is not UTF-8\)"):
        read(str(tmp_path / "binary"))


def test_lines_and_texts(write):
    document = read(write("# c\na: 1\nlist:\n  - x: 0x10\n  - y: 'no'\n"))
    assert [document.line(at) for at in [("a",), ("list",), ("list", 1), ("list", 1, "y")]] == [2, 3, 5, 5]
    assert (document.text(("list", 0, "x")), document.value(("list", 0, "x"))) == ("0x10", 16)
    assert (document.text(("list", 1, "y")), document.text(("list",))) == ("no", None)
    # of what is not there: the line of what encloses it
    assert (document.line(("list", 1, "z")), document.value(("list", 7, "z"))) == (5, None)


def test_own_keys_win_over_merged_ones(write):
    document = read(write("base: &b\n  x: 1\n  z: 3\nmine:\n  <<: *b\n  x: 2\n"))
    assert document.data["mine"] == {"x": 2, "z": 3}
    assert (document.line(("mine", "x")), document.line(("mine", "z"))) == (6, 3)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("1E3", 1000.0), (".5", 0.5), ("-.inf", -math.inf), ("1_000", 1000), ("0x10", 16), ("1.5", 1.5),
     ("2024-01-02", "2024-01-02"), ("12:30", "12:30"), ("1.2.3", "1.2.3"), ("e5", "e5"), ("~", None), ("yes", True)],
)  # fmt: skip
def test_plain_values(write, text, value):
    found = read(write(f"a: {text}")).data["a"]
    assert (found, type(found)) == (value, type(value))


def test_json_may_be_indented_with_tabs(write):
    text = json.dumps({"a": 1e-7, "b": ["x\ty"]}, indent="\t")
    assert read(write(text)).data == {"a": 1e-7, "b": ["x\ty"]}


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(max_size=8), PLAIN, min_size=1, max_size=4))
def test_what_is_dumped_is_read_back(tmp_path, data):
    path = tmp_path / "file.yaml"
    text = yaml_source.dump(data)
    path.write_text(text, encoding="utf-8", newline="")
    found = yaml_source.read(str(path), "--file").data
    assert found == data
    assert json.dumps(found) == json.dumps(data)  # 1 and 1.0 and True are equal in Python
    assert yaml.safe_load(text).keys() == data.keys()  # another reader of YAML sees the same names
