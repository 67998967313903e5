"""Changed elements of a tensor as bytes, and back.

A tensor is compared element by element as unsigned integers, so that NaNs and the two zeros are what their bits are.
``sparse`` stores the gaps between changed elements as one byte each (255: a longer one follows in a separate list)
and their values, byte plane by byte plane, since the upper bytes of values that hardly moved are alike; every part is
compressed with zstd. ``whole`` stores the tensor as it is, where that is smaller or too much changed. The idea of
storing positions and values is that of PULSE (https://arxiv.org/abs/2602.03839).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

Array = NDArray[Any]
Form = Literal["sparse", "whole"]

WORD_BYTES = 8
BLOCK_WORDS = 1 << 17
"""Words compared at a time, of 8 bytes: their mask stays in the cache of a core, where that of a tensor would not."""
WHOLE_ABOVE = 0.3
"""Part of the elements changed, above which positions cost more than they save."""
LONG_GAP = 255
ZSTD_LEVEL = 1


class CorruptDeltaError(ValueError):
    """Encoded changes that are not what ``encode`` writes, or do not lead to the content that they were made for."""


class Encoded(NamedTuple):
    """The changes of one tensor: ``changed`` of its elements, as ``payload``.

    ``all_ones``: one of them has become all ones, which an engine cannot tell from one that has not changed. False with
    differences, which are not for engines.
    """

    form: Form
    payload: bytes
    changed: int
    all_ones: bool


def checksum(data: Any, kind: str) -> str:
    """Return the hex digits of ``data`` (bytes or a contiguous array) under ``--update-weight-delta-checksum``."""
    if kind == "xxh3-128":
        return xxhash.xxh3_128_hexdigest(data)
    if kind == "adler32":
        return f"{zlib.adler32(data):08x}"
    if kind == "blake3":
        from blake3 import blake3

        return str(blake3(data).hexdigest())
    raise ValueError(f"checksum {kind!r}: expected xxh3-128, blake3 or adler32")


def encode(new: Array, old: Array, itemsize: int, *, xor: bool) -> Encoded | None:
    """Return what leads from ``old`` to ``new``, None when they are equal.

    Args:
        new: the content, uint8 [bytes], contiguous.
        old: the content before, of the same size.
        itemsize: bytes of an element of the tensor; positions count elements.
        xor: store values as their difference from the old ones (smaller, and needs exactly ``old`` to be read), or as
            they are (writing them twice does no harm).
    """
    after, before = _elements(new, itemsize), _elements(old, itemsize)
    positions, values = _changed(after, before, xor=xor)
    if not positions.size:
        return None
    all_ones = not xor and bool((values == np.iinfo(values.dtype).max).any())
    if positions.size <= WHOLE_ABOVE * after.size:
        payload = _pack(positions, values)
        if len(payload) < new.size:
            return Encoded("sparse", payload, positions.size, all_ones)
    return Encoded("whole", new.tobytes(), positions.size, all_ones)


def apply(payload: bytes | memoryview, form: str, target: Array, itemsize: int, *, xor: bool) -> None:
    """Write the changes ``payload`` into ``target``, uint8 [bytes], which holds what they were made from.

    Raises CorruptDeltaError for a payload that does not fit.
    """
    if form == "whole":
        content = np.frombuffer(payload, np.uint8)
        if content.size != target.size:
            raise CorruptDeltaError(f"a whole tensor of {content.size} bytes does not fit into {target.size}")
        target[:] = content
        return
    elements = _elements(target, itemsize)
    positions, values = read_sparse(payload, itemsize, elements.size)
    elements[positions] = elements[positions] ^ values if xor else values


def read_sparse(payload: bytes | memoryview, itemsize: int, size: int) -> tuple[Array, Array]:
    """Return the positions, int64, among ``size`` elements, and the values there, unsigned.

    Raises CorruptDeltaError for a payload that does not fit.
    """
    positions, values = _unpack(payload, np.dtype(f"<u{min(itemsize, 8)}"))
    if positions.size and not 0 <= positions.min() <= positions.max() < size:
        raise CorruptDeltaError(f"elements up to {positions.max()} of {size} have changed")
    return positions, values


def _elements(data: Array, itemsize: int) -> Array:
    """View bytes as unsigned integers as wide as an element, or as a half of a complex one."""
    width = min(itemsize, 8)
    return data.view(np.dtype(f"<u{width}"))


def _changed(after: Array, before: Array, *, xor: bool) -> tuple[Array, Array]:
    """Return the positions where two arrays differ, rising, int64, and the values of ``after`` there, or differences.

    Words are compared first, and of those that differ their elements: there are fewer of them to look through, and
    what is looked up lies in the cache.
    """
    per_word = WORD_BYTES // after.itemsize
    shift = per_word.bit_length() - 1
    whole = after.size // per_word * per_word
    words, old_words = after[:whole].view(np.uint64), before[:whole].view(np.uint64)
    mask = np.empty(min(BLOCK_WORDS, words.size), bool)
    found, values = [], []

    def compare(new: Array, old: Array, place: Callable[[Array], Array]) -> None:
        difference = (new ^ old).view(after.dtype)
        inside = np.flatnonzero(difference != 0)
        found.append(place(inside))
        values.append((difference if xor else new.view(after.dtype))[inside])

    for start in range(0, words.size, BLOCK_WORDS):
        part, old_part = words[start : start + BLOCK_WORDS], old_words[start : start + BLOCK_WORDS]
        differs = mask[: part.size]
        np.not_equal(part, old_part, out=differs)
        hits = np.flatnonzero(differs)
        if hits.size:
            first = (hits + start) * per_word
            compare(
                part[hits],
                old_part[hits],
                # per_word is a power of two, and division would take as long as all else here
                lambda inside, first=first: first[inside >> shift] + (inside & per_word - 1),  # type: ignore[misc]
            )
    compare(after[whole:], before[whole:], lambda inside: inside + whole)
    return np.concatenate(found), np.concatenate(values)


def _pack(positions: Array, values: Array) -> bytes:
    """Return count, lengths and parts: gaps, long gaps, and the byte planes of the values from the lowest."""
    gaps = np.empty_like(positions)
    gaps[:1] = positions[:1]
    np.subtract(positions[1:], positions[:-1], out=gaps[1:])
    gaps[1:] -= 1
    short = np.minimum(gaps, LONG_GAP).astype(np.uint8)
    long = gaps[gaps >= LONG_GAP].astype("<u8")
    planes = np.ascontiguousarray(values.view(np.uint8).reshape(values.size, values.itemsize).T)
    compress = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress
    parts = [compress(part) for part in (short.data, long.tobytes(), *(plane.data for plane in planes))]
    return struct.pack(f"<{1 + len(parts)}Q", positions.size, *map(len, parts)) + b"".join(parts)


def _unpack(payload: bytes | memoryview, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    head = struct.Struct(f"<{3 + dtype.itemsize}Q")
    try:
        count, *lengths = head.unpack_from(payload)
        ends = head.size + np.cumsum(lengths, dtype=np.int64)
        starts = [head.size, *ends[:-1]]
        decompress = zstandard.ZstdDecompressor().decompress
        parts = [decompress(payload[start:end]) for start, end in zip(starts, ends, strict=True)]
        gaps = np.frombuffer(parts[0], np.uint8).astype(np.int64)
        gaps[gaps == LONG_GAP] = np.frombuffer(parts[1], "<u8").astype(np.int64)
        planes = np.stack([np.frombuffer(part, np.uint8) for part in parts[2:]], axis=1)
        values = np.ascontiguousarray(planes).view(dtype).reshape(-1)
    except (struct.error, zstandard.ZstdError, ValueError) as e:
        raise CorruptDeltaError(f"changes of {len(payload)} bytes cannot be decoded: {e}") from e
    if not gaps.size == values.size == count:
        raise CorruptDeltaError(f"{count} changes have {gaps.size} positions and {values.size} values")
    return np.cumsum(gaps + 1) - 1, values
