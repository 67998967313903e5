"""Changed elements as bytes and back: any content leads from the old one to the new one, to the bit."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.weights.delta import codec
from slime.weights.delta.codec import CorruptDeltaError, apply, checksum, encode

ITEMSIZES = (1, 2, 4, 8, 16)


def as_bytes(data: bytes) -> Any:
    return np.frombuffer(bytearray(data), np.uint8)


@st.composite
def contents(draw: st.DrawFn) -> tuple[Any, Any, int]:
    """Old and new bytes and the size of an element: nothing, some or all of the elements changed."""
    itemsize = draw(st.sampled_from(ITEMSIZES))
    size = draw(st.integers(0, 40)) if draw(st.booleans()) else draw(st.integers(256, 2000))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = rng.integers(0, 256, size * itemsize, dtype=np.uint8)
    new = old.copy()
    part = draw(st.sampled_from((0.0, 0.001, 0.02, 0.2, 0.5, 1.0)))
    changed = np.flatnonzero(rng.random(size) < part)
    for element in changed:  # one byte of it, whichever
        new[element * itemsize + rng.integers(itemsize)] ^= rng.integers(1, 256, dtype=np.uint8)
    return old, new, itemsize


@given(contents(), st.booleans(), st.sampled_from((2, 125, codec.BLOCK_WORDS)))
@settings(max_examples=150, deadline=None)
def test_changes_lead_to_the_new_content(case: tuple[Any, Any, int], xor: bool, block: int) -> None:
    old, new, itemsize = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "BLOCK_WORDS", block)
        encoded = encode(new, old, itemsize, xor=xor)
    # by brute force: an element has changed where one of its bytes has; complex ones count by halves
    width = min(itemsize, 8)
    changed = sum(bytes(new[i : i + width]) != bytes(old[i : i + width]) for i in range(0, new.size, width))
    if encoded is None:
        assert changed == 0
        return
    assert encoded.changed == changed
    assert len(encoded.payload) <= new.size
    assert encoded.form == "whole" or changed <= 0.3 * new.size / width
    target = old.copy()
    for _ in range(1 if xor and encoded.form == "sparse" else 2):  # new values may be written again
        apply(encoded.payload, encoded.form, target, itemsize, xor=xor)
        assert bytes(target) == bytes(new)


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 300, 70_000])
@pytest.mark.parametrize("xor", [True, False])
def test_gaps_of_every_length(gap: int, xor: bool) -> None:
    old = np.zeros(3 * (gap + 2) + 4000, np.uint16)
    new = old.copy()
    new[[0, gap + 1, 2 * (gap + 1)]] = [1, 0x7FFF, 0x8000]
    encoded = encode(new.view(np.uint8), old.view(np.uint8), 2, xor=xor)
    assert encoded is not None
    assert (encoded.form, encoded.changed) == ("sparse", 3)
    apply(encoded.payload, "sparse", old.view(np.uint8), 2, xor=xor)
    assert (old == new).all()


def test_nans_and_zeros_are_their_bits() -> None:
    old = np.array([np.nan, 0.0, 1.0, np.nan] + 60 * [2.0], np.float32)
    new = old.copy()
    assert encode(new.view(np.uint8), old.view(np.uint8), 4, xor=True) is None  # the same NaN has not changed
    new[1] = -0.0
    new.view(np.uint32)[3] ^= 1  # another NaN
    encoded = encode(new.view(np.uint8), old.view(np.uint8), 4, xor=False)
    assert encoded is not None
    assert encoded.changed == 2
    apply(encoded.payload, encoded.form, old.view(np.uint8), 4, xor=False)
    assert old.tobytes() == new.tobytes()


def test_a_tensor_that_changed_much_is_stored_whole() -> None:
    old = np.zeros(10_000, np.uint16)
    new = old.copy()
    for changed, form in ((3000, "sparse"), (3001, "whole")):
        new[:changed] = 1
        encoded = encode(new.view(np.uint8), old.view(np.uint8), 2, xor=True)
        assert encoded is not None
        assert encoded.form == form


def test_one_percent_changed_takes_less_than_two_percent() -> None:
    rng = np.random.default_rng(0)
    old = (rng.standard_normal(1 << 19, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = old + (rng.random(old.size) < 0.01).astype(np.uint16)  # by one step, as a small update does
    sizes = {}
    for xor in (True, False):
        encoded = encode(new.view(np.uint8), old.view(np.uint8), 2, xor=xor)
        assert encoded is not None
        sizes[xor] = len(encoded.payload) / old.nbytes
    assert sizes[True] < 0.01
    assert sizes[True] < sizes[False] < 0.02


def test_damaged_changes_are_refused() -> None:
    old = np.zeros(4000, np.uint8)
    new = old.copy()
    new[::100] = 7
    encoded = encode(new, old, 1, xor=False)
    assert encoded is not None
    for payload in (b"", encoded.payload[:50], encoded.payload[:-5], b"\xff" * len(encoded.payload)):
        with pytest.raises(CorruptDeltaError):
            apply(payload, "sparse", old.copy(), 1, xor=False)
    with pytest.raises(CorruptDeltaError, match="elements up to 3900 of 100"):
        apply(encoded.payload, "sparse", np.zeros(100, np.uint8), 1, xor=False)
    with pytest.raises(CorruptDeltaError, match="a whole tensor of 3 bytes does not fit into 4"):
        apply(b"abc", "whole", np.zeros(4, np.uint8), 1, xor=False)


def test_checksums() -> None:
    data = as_bytes(b"weights")
    assert checksum(data, "xxh3-128") == xxhash.xxh3_128(b"weights").hexdigest()
    assert checksum(data, "adler32") == f"{zlib.adler32(b'weights'):08x}"
    with pytest.raises(ValueError, match="'md5': expected"):
        checksum(data, "md5")
