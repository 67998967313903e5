"""The rows of prompt files: JSON lines, JSON lists and parquet."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

logger = logging.getLogger(__name__)

_SLICED_PATH = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")
_SURROGATE = re.compile("[\ud800-\udfff]")
_BAD_LINES_SHOWN = 5
_DEEPEST = 200
_BATCH_ROWS = 256


def read_file(path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a ``.jsonl``, ``.json`` or ``.parquet`` file; ``@[a:b]`` behind it selects rows as slices do.

    A ``.json`` file is a list of objects, or one object per line like ``.jsonl``.

    Blank lines are ignored. Lines that are not JSON objects are logged with their number and skipped, and a file in
    which no line is good raises ValueError. Halves of surrogate pairs become U+FFFD, with a warning that names the row.
    Keys of structs in a parquet file are left out where they are null: arrow adds them to rows that were written
    without. Raises FileNotFoundError, and ValueError for any other kind of file.
    """
    for _, row in read_rows(path):
        yield row


def read_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ``(where, row)`` for the rows of ``read_file``: ``where`` names the file and the line, or the row."""
    path, rows = split_slice(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"prompt file {path!r} does not exist (current directory {os.getcwd()})")
    if path.endswith(".jsonl"):
        reader = _read_jsonl(path)
    elif path.endswith(".json"):
        reader = _read_json(path)
    elif path.endswith(".parquet"):
        reader = _read_parquet(path)
    else:
        raise ValueError(f"prompt file {path!r} must end in .jsonl, .json or .parquet")
    if rows is None:
        yield from reader
    elif any(bound is not None and bound < 0 for bound in (rows.start, rows.stop)):
        yield from list(reader)[rows]
    else:
        yield from itertools.islice(reader, rows.start, rows.stop)


def split_slice(path: str) -> tuple[str, slice | None]:
    """Return the file of ``path@[a:b]`` and its slice, None of a path without one."""
    match = _SLICED_PATH.match(path)
    if match is None:
        return path, None
    start, stop = (int(match[name]) if match[name] not in ("", "-") else None for name in ("start", "stop"))
    return match["path"], slice(start, stop)


def parse_line(line: bytes, number: int) -> dict[str, Any]:
    """Return the object of line ``number``, from 1, of a JSON-lines file. Raises ValueError for anything else."""
    try:
        row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except RecursionError:
        raise ValueError(f"it is nested deeper than {_DEEPEST} levels") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {type(row).__name__}")
    if len(line) > 2 * _DEEPEST and line.count(b"[") + line.count(b"{") > _DEEPEST and _is_deep(row):
        raise ValueError(f"it is nested deeper than {_DEEPEST} levels")
    return row


def _read_jsonl(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    good, bad, first = 0, 0, ""
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = parse_line(line, number)
            except ValueError as e:
                bad += 1
                first = first or f"line {number}: {e}"
                if bad <= _BAD_LINES_SHOWN:
                    shown = line[:400].decode("utf-8", "backslashreplace").strip()
                    logger.error("%s line %d is skipped: %s: %.80r", path, number, e, shown)
                continue
            good += 1
            where = f"{path} line {number}"
            may_be_half = b"\\u" in line and (b"\\ud" in line or b"\\uD" in line)
            yield where, _whole_characters(row, where) if may_be_half else row
    if bad:
        logger.error("%s: %d of %d lines are not JSON objects in UTF-8 and were skipped", path, bad, good + bad)
        if not good:
            raise ValueError(f"{path}: none of its {bad} lines is a JSON object in UTF-8; {first:.200}")


def _read_json(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        is_list = file.read(4096).lstrip().startswith("[")
    if not is_list:
        yield from _read_jsonl(path)
        return
    try:
        with open(path, encoding="utf-8-sig") as file:
            rows = json.load(file)
    except RecursionError:
        raise ValueError(f"{path} begins with [ and is nested deeper than {_DEEPEST} levels") from None
    except ValueError as e:
        raise ValueError(f"{path} begins with [ but is no JSON list in UTF-8: {e}") from e
    for number, row in enumerate(rows):
        where = f"{path} entry {number}"
        if not isinstance(row, dict):
            raise ValueError(f"{path}: entry {number} of its list is {type(row).__name__}, expected a JSON object")
        if _is_deep(row):
            raise ValueError(f"{where} is nested deeper than {_DEEPEST} levels")
        yield where, _whole_characters(row, where)


def _is_deep(value: object) -> bool:
    """Return True if ``value`` is nested deeper than what copies and renders it by recursion can take."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            item for one in level if isinstance(one, dict | list)
            for item in (one.values() if isinstance(one, dict) else one)
        ]  # fmt: skip
        if not level:
            return False
    return True


def _whole_characters(row: dict[str, Any], where: str) -> dict[str, Any]:
    """Return ``row`` without halves of surrogate pairs, which JSON can hold and no tokenizer takes."""
    text = json.dumps(row, ensure_ascii=False)
    if not _SURROGATE.search(text):
        return row
    logger.warning("%s: half of a surrogate pair is no character and is read as U+FFFD", where)
    replaced: dict[str, Any] = json.loads(_SURROGATE.sub("\ufffd", text))
    return replaced


def _read_parquet(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as table:
            for batch in _batches(table):
                changes = {
                    name: change
                    for name, column in zip(batch.schema.names, batch.columns, strict=True)
                    if _differs(column) and (change := _as_written(column.type)) is not None
                }
                for row in batch.to_pylist():
                    for name, change in changes.items():
                        row[name] = change(row[name])
                    yield f"{path} row {number}", row
                    number += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as e:
        raise ValueError(f"{path} cannot be read as a parquet file behind row {number}: {e}") from e


def _batches(table: pyarrow.parquet.ParquetFile) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows in batches, smaller ones where rows are so large that a column of a batch exceeds 2 GiB."""
    import pyarrow

    size = _BATCH_ROWS
    for group in range(table.num_row_groups):
        done, whole = 0, False
        while not whole:
            passed = 0
            try:
                for batch in table.iter_batches(batch_size=size, row_groups=[group]):
                    passed += len(batch)
                    if passed > done:
                        yield batch.slice(max(0, len(batch) - (passed - done)))
                        done = passed
                whole = True
            except pyarrow.ArrowNotImplementedError:
                if size == 1:
                    raise
                size = max(1, size // 8)


def _differs(array: pyarrow.Array) -> bool:
    """Return True if a column has structs with null keys, or maps. Few do: most need no second look at each value."""
    from pyarrow import types

    if types.is_struct(array.type):
        fields = [array.field(place) for place in range(array.type.num_fields)]
        return any(field.null_count > 0 or _differs(field) for field in fields)
    return types.is_map(array.type) or (_is_list(array.type) and _differs(array.values))


def _as_written(kind: pyarrow.DataType) -> Callable[[Any], Any] | None:
    """Return a function that makes mappings of maps and leaves null keys out of structs; None where there are none."""
    from pyarrow import types

    if types.is_struct(kind):
        fields = [(field.name, _as_written(field.type)) for field in kind]
        return lambda value: (
            value
            and {
                name: change(value[name]) if change else value[name]
                for name, change in fields
                if value[name] is not None
            }
        )
    if types.is_map(kind):
        inner = _as_written(kind.item_type)
        return lambda value: value if value is None else {key: inner(item) if inner else item for key, item in value}
    if _is_list(kind):
        inner = _as_written(kind.value_type)
        return inner and (lambda value: value and [inner(item) for item in value])
    return None


def _is_list(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))
