"""How jobs and replies travel between a process and its reward workers: a length, then the content.

Jobs are pickles, because labels may be anything a data set holds (numpy values, decimals, dates), and their sender is
trusted. Replies are JSON: a worker has parsed what a model wrote, and nothing it sends may be executed.
"""

from __future__ import annotations

import json
import pickle
import struct
from typing import Any, BinaryIO

LENGTH = struct.Struct("<Q")


def job_frame(value: Any) -> bytes:
    """Return ``value`` as ``read_job`` reads it."""
    return _framed(pickle.dumps(value, protocol=5))


def reply_frame(value: Any) -> bytes:
    """Return ``value`` in a frame of JSON. Raises TypeError or ValueError for what JSON cannot say."""
    return _framed(json.dumps(value).encode())


def read_reply(body: bytes) -> Any:
    """Return what ``reply_frame`` was given, tuples as lists, from a frame's content."""
    return json.loads(body)


def _framed(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


def read_job(stream: BinaryIO) -> Any:
    """Return the next job of ``stream``. Raises EOFError at its end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    return pickle.loads(stream.read(LENGTH.unpack(head)[0]))
