"""Locate the tensors of a safetensors file, without reading them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import NamedTuple


class Span(NamedTuple):
    """One tensor of a file: ``nbytes`` from ``offset`` (of the file) on; ``dtype`` in the format's words (``BF16``)."""

    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element, 1 for a tensor that has none and for elements that share bytes."""
        elements = 1
        for size in self.shape:
            elements *= size
        return max(1, self.nbytes // elements) if elements else 1


def read_header(path: Path) -> tuple[dict[str, Span], dict[str, str]]:
    """Return ``tensor name -> Span`` and the metadata of a file. Raises ValueError naming a file that is damaged."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            found = json.loads(file.read(length))
        metadata = found.pop("__metadata__", {})
        spans = {}
        for name, one in found.items():
            begin, end = one["data_offsets"]
            spans[name] = Span(8 + length + begin, end - begin, one["dtype"], tuple(one["shape"]))
    except (struct.error, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path} is no safetensors file: {type(e).__name__}: {e}") from e
    return spans, metadata
