"""Append-only files of JSON lines in which an incomplete end is recognized, and damage too.

A line is ``{"crc":"<crc32 of the record, hexadecimal>","len":<bytes of the record>,"record":<JSON>}``: any JSON tool
reads it, and the part that a killed process or a full disk left of the last one is not mistaken for a record.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_HEAD = re.compile(rb'\{"crc":"([0-9a-f]{8})","len":(\d+),"record":')


def to_json(value: object) -> bytes:
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
    """Yield every whole record, each with the number of bytes of the file that end with it.

    What a kill left of the last one is no record, and neither is what follows a block that never reached the disk.
    Raises ValueError, naming ``path``, for a record that is damaged.
    """
    end = 0
    with open(path, "rb") as file:
        for line in file:
            try:
                record = decode_record(line)
            except ValueError:
                if _has_hole(line) or (_is_torn(line) and not file.read(1)):
                    return
                raise ValueError(
                    f"{path} is damaged at byte {end}: remove it, and what it holds is generated again"
                ) from None
            end += len(line)
            yield record, end


def _has_hole(line: bytes) -> bool:
    """True if a lost machine left zeros in a line: blocks that never reached the disk, where later ones may have.

    JSON has none; a single one within a line may be a space of which a bit was flipped.
    """
    return b"\0\0" in line or line.endswith(b"\0")


def _is_torn(line: bytes) -> bool:
    """True if a line without a record is the beginning of one."""
    head = _HEAD.match(line)
    whole = head is not None and len(line) >= head.end() + int(head[2]) + 2
    return not line.endswith(b"\n") and not whole
