"""Prompt files and data sets."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slime.utils.data import Dataset, build_messages, filter_long_prompt, get_source, read_file
from slime.utils.types import Sample
from tests.support.rollout_args import CharTokenizer


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def ten(tmp_path):
    return write(tmp_path / "ten.jsonl", [{"input": f"p{i}", "n": i} for i in range(10)])


@pytest.mark.parametrize("suffix", ["[2:5]", "[:3]", "[7:]", "[:]", "[-2:]", "[:-8]", "[5:2]", "[3:100]"])
def test_slices_are_those_of_python(ten, suffix):
    start, stop = (int(x) if x else None for x in suffix[1:-1].split(":"))
    assert [row["n"] for row in read_file(f"{ten}@{suffix}")] == list(range(10))[start:stop]


def test_parquet_gives_the_same_rows(tmp_path, ten):
    rows = list(read_file(ten))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "ten.parquet")
    assert list(read_file(str(tmp_path / "ten.parquet"))) == rows
    assert [row["n"] for row in read_file(f"{tmp_path}/ten.parquet@[-3:-1]")] == [7, 8]


@pytest.mark.parametrize("written", [json.dumps, lambda rows: "\n" + json.dumps(rows, indent=2)])
def test_a_json_file_is_a_list_or_lines(tmp_path, ten, written):
    rows = list(read_file(ten))
    as_list, as_lines = tmp_path / "list.json", tmp_path / "lines.json"
    as_list.write_text(written(rows))
    write(as_lines, rows)
    assert list(read_file(str(as_list))) == list(read_file(str(as_lines))) == rows
    assert [row["n"] for row in read_file(f"{as_list}@[2:4]")] == [2, 3]


@pytest.mark.parametrize(
    ("text", "message"), [('[{"a": 1}', "is no JSON list"), ('[{"a": 1}, 2]', "entry 1 of its list is int")]
)
def test_a_broken_json_list_is_refused(tmp_path, text, message):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        list(read_file(str(tmp_path / "x.json")))


def test_bad_lines_are_reported_and_skipped(tmp_path, caplog):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"a": 1}\n\n{"a": \n[1]\n   \n{"a": 2}\n')
    assert [row["a"] for row in read_file(str(path))] == [1, 2]
    assert "line 3 is skipped" in caplog.text
    assert "line 4 is skipped: expected a JSON object, got list" in caplog.text
    assert "2 of 4 lines" in caplog.text
    path.write_text("nothing\nhere\n")
    with pytest.raises(ValueError, match="none of its 2 lines"):
        list(read_file(str(path)))


def test_missing_and_unknown_files():
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        list(read_file("nowhere.jsonl@[1:2]"))
    with pytest.raises(ValueError, match=r"must end in \.jsonl, \.json or \.parquet"):
        list(read_file(__file__))


def make(path, **options):
    return Dataset(path, CharTokenizer(), None, options.pop("max_length", None), prompt_key="input", **options)


def test_labels_metadata_and_tools(tmp_path):
    rows = [
        {"input": "a", "answer": 4, "metadata": {"k": 1}, "tools": '[{"name": "t"}]'},
        {"input": "b", "answer": "5", "metadata": None},
    ]
    data = make(write(tmp_path / "x.jsonl", rows), label_key="answer", tool_key="tools")
    assert [(s.prompt, s.label, s.metadata) for s in data.samples] == [
        ("a", 4, {"k": 1, "tools": [{"name": "t"}]}), ("b", "5", {}),
    ]  # fmt: skip
    assert len(data) == 2
    assert data[1].prompt == "b"


def test_missing_columns_name_the_row_and_what_there_is(ten):
    with pytest.raises(KeyError, match=r"line 1 has no column 'answer' for the label; it has \['input', 'n'\]"):
        make(ten, label_key="answer")
    with pytest.raises(KeyError, match="no column 'text' for the prompt"):
        Dataset(ten, CharTokenizer(), None, None)


def test_chat_template_takes_strings_and_messages(tmp_path):
    rows = [{"input": "hi"}, {"input": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}]
    data = make(write(tmp_path / "x.jsonl", rows), apply_chat_template=True)
    assert [s.prompt for s in data.samples] == ["user:hi\n", "system:s\nuser:u\n"]
    plain = make(write(tmp_path / "x.jsonl", rows[1:]))
    assert plain[0].prompt == rows[1]["input"]


def test_long_prompts_are_dropped_in_place(tmp_path, caplog):
    lengths = [3, 9, 5, 6, 1] * 500
    data = make(write(tmp_path / "x.jsonl", [{"input": "x" * n} for n in lengths]), max_length=5)
    assert [len(s.prompt) for s in data.samples] == [3, 5, 1] * 500
    with pytest.raises(ValueError, match="no usable prompt"):
        make(write(tmp_path / "x.jsonl", [{"input": "long one"}]), max_length=5)
    long, short = ([{"role": "user", "content": "x" * n}] for n in (14, 15))  # and 6 characters of the template
    prompts = [Sample(prompt=p) for p in (long, short, "x" * 21, "x" * 20, [7] * 20, [7] * 21, ["a plug-in's"])]
    assert filter_long_prompt(prompts, CharTokenizer(), None, 20) == [prompts[i] for i in (0, 3, 4, 6)]
    assert "of 20 prompt tokens is not applied to 1 of 7 prompts" in caplog.text


def test_shuffles_depend_on_seed_and_epoch_only(ten):
    data, other = make(ten, seed=1), make(ten, seed=1)
    orders = []
    for epoch in range(4):
        data.shuffle(epoch)
        orders.append([s.prompt for s in data.samples])
    other.shuffle(3)
    assert [s.prompt for s in other.samples] == orders[3]
    assert all(sorted(order) == [f"p{i}" for i in range(10)] for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    shifted = make(ten, seed=2)
    shifted.shuffle(2)
    assert [s.prompt for s in shifted.samples] == orders[3]


def test_media_replace_their_placeholders_in_order():
    row = {"p": "a <image> b<video><image>", "imgs": np.array(["1.png", "2.png"]), "vids": ["v.mp4"]}
    messages = build_messages(row, "p", True, {"image": "imgs", "video": "vids"})
    assert messages == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a "}, {"type": "image", "image": "1.png"}, {"type": "text", "text": " b"},
                {"type": "video", "video": "v.mp4"}, {"type": "image", "image": "2.png"},
            ],
        }
    ]  # fmt: skip
    ready = build_messages(
        {"p": "<image>", "imgs": [{"type": "image", "image": "x", "size": 3}]}, "p", True, {"image": "imgs"}
    )
    assert ready[0]["content"] == [{"type": "image", "image": "x", "size": 3}]


@pytest.mark.parametrize(
    ("text", "images"), [("<image><image>", ["a"]), ("<image>", ["a", "b"]), ("x", ["a"]), ("<image>", None)]
)
def test_media_that_do_not_match_up_are_refused(text, images):
    with pytest.raises(AssertionError, match=r"more <image> placeholders|more media items"):
        build_messages({"p": text, "imgs": images}, "p", True, {"image": "imgs"})


def test_sources():
    sample = Sample()
    assert get_source(sample) == "unknown"
    sample.metadata["source_name"] = "books"
    assert get_source(sample) == "books"
    sample.source = "web"
    assert get_source(sample) == "web"


def test_text_in_another_encoding_is_named_by_file_and_line(tmp_path, caplog):
    path = tmp_path / "x.jsonl"
    path.write_bytes('{"input": "é"}\n'.encode() + '{"input": "é"}\n'.encode("latin-1") + b'{"input": "b"}\n')
    assert [row["input"] for row in read_file(str(path))] == ["é", "b"]
    assert f"{path} line 2 is skipped: 'utf-8' codec can't decode" in caplog.text
    path.write_bytes('{"input": "a"}\n'.encode("utf-16"))
    with pytest.raises(ValueError, match=r"x\.jsonl: none of its 2 lines is a JSON object in UTF-8"):
        list(read_file(str(path)))


def test_a_byte_order_mark_costs_no_row(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"input": "a"}\n')
    assert list(read_file(str(path))) == [{"input": "a"}]


def test_a_damaged_parquet_file_is_named(tmp_path):
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1 cut off")
    with pytest.raises(ValueError, match=r"x\.parquet cannot be read as a parquet file behind row 0"):
        list(read_file(str(path)))


@pytest.mark.parametrize("prompt", [None, 3, 1.5, {"role": "user"}, True])
def test_a_prompt_of_another_type_is_named_by_file_and_line(prompt, tmp_path):
    path = write(tmp_path / "x.jsonl", [{"input": "a"}, {"input": prompt}])
    kind = type(prompt).__name__
    with pytest.raises(ValueError, match=rf"x\.jsonl line 2: column 'input' must hold text or a list .*, got {kind}"):
        make(path)


@pytest.mark.parametrize("message", ["text", {"content": "no role"}, {"role": "user"}])
def test_a_message_of_another_form_is_named(message, tmp_path):
    rows = [{"input": [{"role": "user", "content": "a"}, message]}]
    path = write(tmp_path / "x.jsonl", rows)
    with pytest.raises(ValueError, match=r"line 1: column 'input': message 1 must have a role and a content"):
        make(path, apply_chat_template=True)
    assert make(path)[0].prompt == rows[0]["input"]  # nothing renders it: a plug-in may read what it likes


def test_what_the_template_refuses_is_named_by_its_line(tmp_path):
    class Strict(CharTokenizer):
        def apply_chat_template(self, *args, **kwargs):
            raise TypeError("roles must alternate")

    path = write(tmp_path / "x.jsonl", [{"input": "a"}])
    with pytest.raises(ValueError, match=r"line 1: the chat template cannot render it: TypeError: roles must"):
        Dataset(path, Strict(), None, None, prompt_key="input", apply_chat_template=True)


def test_prompts_that_no_engine_takes_are_dropped_without_being_asked_to(tmp_path, caplog):
    path = write(tmp_path / "x.jsonl", [{"input": "x" * n} for n in (3, 9, 5)])
    assert [len(s.prompt) for s in make(path, engine_max_length=5).samples] == [3, 5]
    assert "1 of 3 prompts have more than 5 tokens and are dropped" in caplog.text
    assert len(make(path, engine_max_length=5, max_length=9)) == 3  # what is given wins
    messages = write(tmp_path / "m.jsonl", [{"input": [{"role": "user", "content": "x" * 50}]}])
    caplog.clear()
    assert len(make(messages, engine_max_length=5)) == 1
    assert caplog.text == ""


def test_only_what_may_be_too_long_is_tokenized(tmp_path):
    class Counting(CharTokenizer):
        seen = 0

        def __call__(self, texts, **kwargs):
            Counting.seen += len(texts)
            return super().__call__(texts, **kwargs)

    path = write(tmp_path / "x.jsonl", [{"input": text} for text in ("abc", "éééé", "x" * 9)])
    data = Dataset(path, Counting(), None, 5, prompt_key="input")
    assert [s.prompt for s in data.samples] == ["abc", "éééé"]  # 4 tokens, though 8 bytes
    assert Counting.seen == 2
