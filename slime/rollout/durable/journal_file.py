"""Append-only files of JSON lines in which a torn or damaged end is recognised.

A line is ``{"crc":"<crc32 of the record, hexadecimal>","len":<bytes of the record>,"record":<JSON>}``: any JSON tool
reads it, and whatever a killed process or a full disk left of the last one is not mistaken for a record.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_HEAD = re.compile(rb'\{"crc":"([0-9a-f]{8})","len":(\d+),"record":')


def to_json(value: Any) -> bytes:
    """Return ``value`` as JSON on one line."""
    return json.dumps(value, separators=(",", ":")).encode()


def encode_parts(body: Sequence[bytes]) -> list[bytes]:
    """Return the line of a record that is JSON on one line already; it comes in parts, so that none is copied."""
    checksum = 0
    for part in body:
        checksum = zlib.crc32(part, checksum)
    return [b'{"crc":"%08x","len":%d,"record":' % (checksum, sum(map(len, body))), *body, b"}\n"]


def decode_record(line: bytes) -> Any:
    """Return the record of a line of ``encode_parts``. Raises ValueError for anything else than one whole line."""
    head = _HEAD.match(line)
    if head is None or not line.endswith(b"}\n"):
        raise ValueError("no record")
    body = line[head.end() : -2]
    if len(body) != int(head[2]) or zlib.crc32(body) != int(head[1], 16):
        raise ValueError("a damaged record")
    return json.loads(body)


def read_records(path: Path) -> Iterator[tuple[Any, int]]:
    """Yield every record up to the first damage, each with the number of bytes of the file that end with it."""
    end = 0
    with open(path, "rb") as file:
        for line in file:
            try:
                record = decode_record(line)
            except ValueError:
                return
            end += len(line)
            yield record, end
