"""Files as people have them: what arrow adds, what is too large or too deep, and what is no text."""

from __future__ import annotations

import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slime.utils import prompt_files
from slime.utils.data import Dataset, read_file
from slime.utils.prompt_files import read_rows
from tests.support.rollout_args import CharTokenizer


def tool(name: str, **parameters: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": {"properties": parameters}}}


def call(**arguments: object) -> dict[str, object]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


ROWS = [
    {
        "prompt": [{"role": "user", "content": "w"}, {**call(city="Paris"), "content": "so"}],
        "tools": [tool("weather", city={"type": "string"})],
        "metadata": {"level": 1},
        "label": "a",
    },
    {
        "prompt": [{"role": "user", "content": "3*4"}, call(expr="3*4")],
        "tools": [tool("math", expr={"type": "string", "enum": ["a"]}), tool("none")],
        "metadata": {"tools": {"kept": [1, 2]}},
        "label": None,
    },
    {"prompt": [{"role": "user", "content": "hi"}], "tools": None, "metadata": None, "label": "c"},
]


def parquet(path, rows, **options):
    pq.write_table(rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows), path, **options)
    return str(path)


def jsonl(path, *rows):
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return str(path)


def test_parquet_rows_have_no_key_that_was_not_written(tmp_path):
    assert list(read_file(parquet(tmp_path / "x.parquet", ROWS))) == ROWS
    explicit = {"prompt": [], "tools": [tool("f", x={"default": None})]}
    assert list(read_file(jsonl(tmp_path / "x.jsonl", explicit))) == [explicit]  # a file of JSON can tell


def random_value(rng, depth):
    kind = rng.randrange(5 if depth else 3)
    if kind < 3:
        return rng.choice(["", "x", "é"])
    if kind == 3:
        return [{f"k{rng.randrange(4)}": "v"} for _ in range(rng.randrange(3))]
    return {f"s{key}": random_struct(rng, depth - 1) for key in range(rng.randrange(1, 3))}


def random_struct(rng, depth):
    found = {f"t{rng.randrange(3)}": "x", "n": rng.randrange(9)}
    if depth:
        found["inner"] = [random_struct(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
    return found


@pytest.mark.parametrize("seed", range(20))
def test_random_structs_are_read_as_they_were_written(seed, tmp_path):
    rng = random.Random(seed)
    rows = [{"prompt": "p", "tools": [random_struct(rng, 2)], "metadata": random_struct(rng, 1)} for _ in range(30)]
    path = parquet(tmp_path / "x.parquet", rows, row_group_size=rng.choice([1, 7, 100]))
    assert list(read_file(path)) == rows


def test_maps_are_objects_and_their_nulls_stay(tmp_path):
    kind = pa.map_(pa.string(), pa.struct([("a", pa.int64()), ("b", pa.int64())]))
    values = [[("x", {"a": 1, "b": None}), ("y", None)], [], None]
    table = pa.table({"prompt": ["p"] * 3, "metadata": pa.array(values, kind)})
    found = [row["metadata"] for row in read_file(parquet(tmp_path / "x.parquet", table))]
    assert found == [{"x": {"a": 1}, "y": None}, {}, None]


def test_rows_too_large_for_a_batch_are_read_in_smaller_ones(tmp_path, monkeypatch):
    rows = [{"n": i} for i in range(50)]
    path = parquet(tmp_path / "x.parquet", rows, row_group_size=20)
    whole, sizes = pq.ParquetFile.iter_batches, []

    def refuse_large(self, batch_size, row_groups):
        sizes.append(batch_size)
        for batch in whole(self, batch_size=min(batch_size, 3), row_groups=row_groups):
            yield batch
            if batch_size > 4:
                raise pa.ArrowNotImplementedError("Nested data conversions not implemented for chunked array outputs")

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", refuse_large)
    assert list(read_file(path)) == rows
    assert sizes[0] > 4 >= sizes[-1]


@pytest.mark.slow
def test_a_row_group_of_more_than_two_gib(tmp_path):
    text = pa.array(["x" * (1 << 20)])
    rows = 2300
    column = pa.ListArray.from_arrays(
        pa.array(range(rows + 1), pa.int32()),
        pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), text),
    )
    table = pa.table({"tests": column, "n": list(range(rows))})
    # Without arrow's schema the column is read as text, and is that large, though the file holds the text once.
    path = parquet(tmp_path / "x.parquet", table, row_group_size=rows, store_schema=False)
    count = 0
    for row in read_file(path):
        assert row["n"] == count
        assert len(row["tests"][0]) == 1 << 20
        count += 1
    assert count == rows


def nested(depth: int) -> bytes:
    return b'{"input": "p", "x": ' + b"[" * depth + b"]" * depth + b"}"


@pytest.mark.parametrize("depth", [300, 990, 5000, 200_000])
def test_lines_that_are_nested_too_deep_are_skipped_by_number(depth, tmp_path, caplog):
    path = jsonl(tmp_path / "x.jsonl", {"input": "a"}, nested(depth), {"input": "b"}, nested(100))
    assert [row["input"] for row in read_file(path)] == ["a", "b", "p"]
    assert "line 2 is skipped: it is nested deeper than 200 levels" in caplog.text
    (tmp_path / "x.json").write_bytes(b"[" + nested(depth) + b"]")
    with pytest.raises(ValueError, match=r"x\.json .*nested deeper than 200 levels"):
        list(read_file(str(tmp_path / "x.json")))
    with pytest.raises(ValueError, match=r"none of its 1 lines is a JSON object in UTF-8; line 1: it is nested"):
        list(read_file(jsonl(tmp_path / "y.jsonl", nested(depth))))


@pytest.mark.parametrize("half", ["\\ud83d", "\\uDC00", "\\ud83d\\ud83d"])
def test_half_a_surrogate_pair_is_replaced_and_its_row_named(half, tmp_path, caplog):
    line = b'{"input": "bad %s end", "metadata": {"k": ["%s"]}, "smile": "\\ud83d\\ude00"}'
    line = line.replace(b"%s", half.encode())
    path = jsonl(tmp_path / "x.jsonl", {"input": "a"}, line)
    read = "\ufffd" * half.count("\\")
    data = Dataset(path, CharTokenizer(), None, 20, prompt_key="input")
    assert (data[1].prompt, data[1].metadata) == (f"bad {read} end", {"k": [read]})
    assert list(read_file(path))[1]["smile"] == "😀"
    assert "x.jsonl line 2: half of a surrogate pair" in caplog.text
    (tmp_path / "x.json").write_bytes(b"[" + line + b"]")
    assert next(read_file(str(tmp_path / "x.json")))["input"] == f"bad {read} end"
    "".join(str(row) for row in read_file(path)).encode()


def test_other_ends_of_lines_and_numbers_of_any_size(tmp_path, caplog):
    path = tmp_path / "x.jsonl"
    big = 10**40
    path.write_bytes(f'{{"input": "a", "n": {big}}}\r\n\r\n{{"input": "b", "n": {"9" * 5000}}}\r\n'.encode())
    assert list(read_file(str(path))) == [{"input": "a", "n": big}]
    assert "line 3 is skipped" in caplog.text


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_an_empty_file_has_no_rows(name, tmp_path):
    (tmp_path / name).write_bytes(b"")
    assert list(read_file(str(tmp_path / name))) == []
    with pytest.raises(ValueError, match=rf"{name} holds no usable prompt: no rows"):
        Dataset(str(tmp_path / name), CharTokenizer(), None, None)


def test_text_that_is_no_utf8_in_a_parquet_file_is_named(tmp_path):
    broken = pa.array([b"ok", b"\xff\xfe"]).view(pa.string())
    with pytest.raises(ValueError, match=r"x\.parquet cannot be read as a parquet file behind row 0: 'utf-8' codec"):
        list(read_file(parquet(tmp_path / "x.parquet", pa.table({"prompt": broken}))))


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_in_a_file_of_lines_never_end_the_reading(seed, tmp_path):
    rng = random.Random(seed)
    good = json.dumps({"input": [{"role": "user", "content": "é"}], "tools": '[{"a": 1}]'}).encode()
    lines = []
    for _ in range(300):
        line = bytearray(good)
        for _ in range(rng.randrange(0, 4)):
            place = rng.randrange(len(line))
            line[place : place + rng.randrange(3)] = rng.choice([b"", b"\xff", b"[", b"\\ud800", b"\x00", b"{", b'"'])
        lines.append(bytes(line).replace(b"\n", b""))
    path = jsonl(tmp_path / "x.jsonl", good, *lines)
    numbers = [int(where.rpartition(" ")[2]) for where, row in read_rows(path) if isinstance(row, dict)]
    assert numbers == sorted(set(numbers))
    assert {number for number, line in enumerate([good, *lines], 1) if line == good} <= set(numbers)


def test_lines_of_bad_rows_are_read_once(tmp_path):
    with pytest.raises(ValueError, match="expected a JSON object, got list"):
        prompt_files.parse_line(b"[1]", 1)
