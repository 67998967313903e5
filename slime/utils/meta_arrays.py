"""Decoding of the int32 arrays that engines put into ``meta_info``."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np


def decode_int32_meta_array(value: Any) -> np.ndarray:
    """Return ``value`` as a flat int32 numpy array.

    ``value`` is base64 text, raw little-endian bytes, or any (nested) list, array or tensor of integers. Raises
    ValueError when it is none of these or its bytes are not a multiple of four.
    """
    if isinstance(value, str):
        try:
            value = base64.b64decode(value, validate=True)
        except ValueError as e:
            raise ValueError(f"expected base64 text of int32 values, got {value[:40]!r}: {e}") from e
    if isinstance(value, (bytes, bytearray, memoryview)):
        if len(value) % 4:
            raise ValueError(f"{len(value)} bytes are not a whole number of int32 values")
        return np.frombuffer(bytes(value), dtype="<i4").astype(np.int32, copy=True)
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"expected integers, got an array of {array.dtype}")
    return array.astype(np.int32).reshape(-1)


def first_present(mapping: Mapping[str, Any], *names: str) -> Any:
    """Return the first value among ``names`` that is in ``mapping`` and not None; else None."""
    return next((mapping[name] for name in names if mapping.get(name) is not None), None)


def to_int32_tensor(values: Any) -> Any:
    """Return a torch int32 tensor; torch is imported only here, so that types stay importable without it."""
    import torch

    return torch.from_numpy(np.array(values, dtype=np.int32))
