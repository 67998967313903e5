"""How jobs and replies travel between a process and its reward workers: a length, then a pickle.

Pickles, because labels may be anything a data set holds (numpy values, decimals, dates). Both ends are this program.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any, BinaryIO

LENGTH = struct.Struct("<Q")


def frame(value: Any) -> bytes:
    """Return ``value`` as ``read_frame`` reads it."""
    body = pickle.dumps(value, protocol=5)
    return LENGTH.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> Any:
    """Return the next object of ``stream``. Raises EOFError at its end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    return pickle.loads(stream.read(LENGTH.unpack(head)[0]))
