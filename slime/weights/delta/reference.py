"""The format of changes that slime <= 0.3.1 wrote: read only.

A directory has safetensors files whose tensors are 1-D uint8 under the name of a weight: zstd of the XOR of old and new
bytes, or of ``u4 count, u4 positions [count], bytes [count]``, where positions count bytes. The ``__metadata__`` of a
file has the checksum of every weight's new bytes; the index says which of the two it is (``delta_encoding``), which
version the changes lead to and from which one. An index without ``delta_encoding`` is that of a whole checkpoint.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from slime.weights.delta.codec import Array, CorruptDeltaError, checksum
from slime.weights.hf.checkpoint import INDEX
from slime.weights.hf.safetensors_header import read_header


def apply_version(directory: str | Path, weights: Mapping[str, Array], version: str) -> str:
    """Change ``weights`` (name -> uint8 [bytes]), which are those of ``version``; return the version that they become.

    Every weight is replaced in place when its new content has been computed and agrees with its checksum. Raises
    CorruptDeltaError naming the weight that does not agree, or where the changes belong to another version.
    """
    directory = Path(directory)
    index = json.loads((directory / INDEX).read_text())
    about = index["metadata"]
    encoding, kind = about.get("delta_encoding"), about.get("checksum_format", "xxh3-128")
    if encoding not in ("xor", "overwrite") or about.get("compression_format", "zstd") != "zstd":
        raise CorruptDeltaError(
            f"{directory / INDEX}: expected changes as xor or overwrite under zstd, found {encoding} under "
            f"{about.get('compression_format')}"
        )
    if about["base_version"] != version:
        raise CorruptDeltaError(f"{directory} changes version {about['base_version']}, and the weights are {version}")
    for file in sorted(set(index["weight_map"].values())):
        header, metadata = read_header(directory / file)
        content = np.memmap(directory / file, np.uint8, "r")
        for name, span in header.items():
            new = decode(content[span.offset : span.offset + span.nbytes].tobytes(), weights[name], encoding)
            if checksum(new, kind) != metadata[name]:
                raise CorruptDeltaError(f"{directory / file}: {name} does not become what its {kind} says")
            weights[name][:] = new
    return str(about["version"])


def decode(payload: bytes, old: Array, encoding: str) -> Array:
    """Return the new bytes of a weight, uint8 like ``old``, from its tensor in a file of changes."""
    try:
        content: Any = zstandard.ZstdDecompressor().decompress(payload)
        if encoding == "xor":
            return np.frombuffer(content, np.uint8) ^ old
        (count,) = struct.unpack_from("<I", content)
        positions = np.frombuffer(content, "<u4", count, 4)
        new = old.copy()
        new[positions] = np.frombuffer(content, np.uint8, count, 4 + 4 * count)
    except (struct.error, zstandard.ZstdError, ValueError, IndexError) as e:
        raise CorruptDeltaError(f"changes of {len(payload)} bytes cannot be decoded: {e}") from e
    return new
