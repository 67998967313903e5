"""Changes as slime <= 0.3.1 wrote them, made here by hand after its description."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard
from safetensors.numpy import save_file

from slime.weights.delta.codec import CorruptDeltaError
from slime.weights.delta.reference import apply_version
from slime.weights.hf.safetensors_header import read_header

OLD = {"a": bytes(range(256)) * 4, "b": b"\x00" * 100, "unchanged": b"same"}
NEW = {"a": bytes(range(255, -1, -1)) * 4, "b": b"\x00" * 50 + b"\x07\x08" + b"\x00" * 48, "unchanged": b"same"}


def xor(old: bytes, new: bytes) -> bytes:
    return bytes(x ^ y for x, y in zip(old, new, strict=True))


def overwrite(old: bytes, new: bytes) -> bytes:
    at = [i for i in range(len(new)) if old[i] != new[i]]
    return struct.pack(f"<I{len(at)}I", len(at), *at) + bytes(new[i] for i in at)


def written(directory: Path, form: Any, encoding: str, **about: str) -> Path:
    """Two ranks with one changed tensor each, and their index."""
    directory.mkdir()
    files = {}
    for rank, name in enumerate(("a", "b")):
        files[name] = f"model-{rank:05d}-of-00002.safetensors"
        packed = zstandard.ZstdCompressor(level=1).compress(form(OLD[name], NEW[name]))
        sums = {name: xxhash.xxh3_128(NEW[name]).hexdigest()}
        save_file({name: np.frombuffer(packed, np.uint8)}, directory / files[name], metadata=sums)
    metadata = {"version": "000004", "base_version": "000003", "delta_encoding": encoding, "compression_format": "zstd"}
    index = {"metadata": {**metadata, "checksum_format": "xxh3-128", **about}, "weight_map": files}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def weights() -> dict[str, Any]:
    return {name: np.frombuffer(bytearray(data), np.uint8) for name, data in OLD.items()}


@pytest.mark.parametrize(("form", "encoding"), [(xor, "xor"), (overwrite, "overwrite")])
def test_changes_are_read(form: Any, encoding: str, tmp_path: Path) -> None:
    directory = written(tmp_path / "weight_v000004", form, encoding)
    found = weights()
    assert apply_version(directory, found, "000003") == "000004"
    assert {name: data.tobytes() for name, data in found.items()} == NEW


def test_other_versions_and_formats_are_refused(tmp_path: Path) -> None:
    directory = written(tmp_path / "one", xor, "xor")
    with pytest.raises(CorruptDeltaError, match="changes version 000003, and the weights are 000002"):
        apply_version(directory, weights(), "000002")
    with pytest.raises(CorruptDeltaError, match="expected changes as xor or overwrite under zstd, found None"):
        apply_version(written(tmp_path / "whole", xor, None), weights(), "000003")  # type: ignore[arg-type]
    with pytest.raises(CorruptDeltaError, match="cannot be decoded"):
        apply_version(written(tmp_path / "mixed", lambda old, new: b"\xff" * 9, "overwrite"), weights(), "000003")


def test_a_weight_that_does_not_become_what_its_checksum_says_stays(tmp_path: Path) -> None:
    found = weights()
    found["b"][0] = 1  # not what the changes were made from
    with pytest.raises(CorruptDeltaError, match="b does not become what its xxh3-128 says"):
        apply_version(written(tmp_path / "one", xor, "xor"), found, "000003")
    assert found["b"].tobytes() == b"\x01" + OLD["b"][1:]


def test_where_tensors_lie(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors: dict[str, Any] = {
        "x": np.arange(6, dtype=np.float32).reshape(2, 3),
        "y": np.array(7, np.int64),
        "z": np.empty((0, 4)),
    }
    save_file(tensors, path, metadata={"k": "v"})
    spans, metadata = read_header(path)
    data = path.read_bytes()
    assert metadata == {"k": "v"}
    for name, tensor in tensors.items():
        span = spans[name]
        assert data[span.offset : span.offset + span.nbytes] == tensor.tobytes()
        assert (span.shape, span.itemsize) == (tensor.shape, tensor.itemsize if tensor.size else 1)
    assert spans["x"].dtype == "F32"
    path.write_bytes(data[:20])
    with pytest.raises(ValueError, match=r"x\.safetensors is no safetensors file"):
        read_header(path)
