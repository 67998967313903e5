"""Samples as JSON: exact, safe to load, and compact for long lists of numbers.

Arrays and tensors become ``{"__array__": [dtype, shape, base64]}`` (tensors with ``"torch": true``), long lists of
plain ints or floats ``{"__ints__": base64}`` / ``{"__floats__": base64}``, images base64 PNG.
"""

from __future__ import annotations

import base64
import logging
from typing import Any

import numpy as np

from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_LONG = 16
_TAGS = {"__array__", "__ints__", "__floats__", "__bytes__", "__image__", "__escaped__"}


class NotStorable(TypeError):
    """A value that has no form in the state file."""


def encode_group(group: Any) -> Any:
    """Encode a (nested) list of samples."""
    if isinstance(group, list):
        return [encode_group(item) for item in group]
    return _encode_sample(group)


def decode_group(data: Any) -> Any:
    """Inverse of ``encode_group``."""
    if isinstance(data, list):
        return [decode_group(item) for item in data]
    return Sample.from_dict(decode_value(data))


def _encode_sample(sample: Sample) -> dict[str, Any]:
    encoded = {}
    for name, value in sample.to_dict().items():
        try:
            encoded[name] = encode_value(value)
        except NotStorable as e:
            if name in Sample.__dataclass_fields__ and name != "trace":
                raise NotStorable(f"sample index={sample.index}: field {name!r} cannot be saved: {e}") from e
            logger.warning("sample index=%s: attribute %r is not saved with the buffer: %s", sample.index, name, e)
    return encoded


def encode_value(value: Any) -> Any:
    """Return ``value`` as JSON types. Raises NotStorable for objects of other kinds."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return _encode_list(value)
    if isinstance(value, dict):
        encoded = {str(key): encode_value(item) for key, item in value.items()}
        return {"__escaped__": encoded} if _TAGS & encoded.keys() else encoded
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode("ascii")}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return {"__array__": [value.dtype.str, list(value.shape), _b64(value)]}
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        return _encode_tensor(value)
    if type(value).__module__.partition(".")[0] == "PIL":
        from slime.utils.processing_utils import encode_image_for_rollout_engine

        return {"__image__": encode_image_for_rollout_engine(value)}
    raise NotStorable(f"a {type(value).__module__}.{type(value).__qualname__} has no form in the state file")


def decode_value(value: Any) -> Any:
    """Inverse of ``encode_value`` (tuples come back as lists)."""
    if isinstance(value, list):
        return [decode_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "__escaped__" in value:
        return {key: decode_value(item) for key, item in value["__escaped__"].items()}
    if "__ints__" in value:
        return np.frombuffer(base64.b64decode(value["__ints__"]), "<i8").tolist()
    if "__floats__" in value:
        return np.frombuffer(base64.b64decode(value["__floats__"]), "<f8").tolist()
    if "__bytes__" in value:
        return base64.b64decode(value["__bytes__"])
    if "__array__" in value:
        dtype, shape, data = value["__array__"]
        array = np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
        return _to_tensor(array, value["torch"]) if "torch" in value else array
    if "__image__" in value:
        from slime.utils.processing_utils import _open_image

        return _open_image(value["__image__"])
    return {key: decode_value(item) for key, item in value.items()}


def _encode_list(values: list[Any] | tuple[Any, ...]) -> Any:
    if len(values) >= _LONG:
        kinds = set(map(type, values))
        if kinds == {int} and min(values) >= -(2**63) and max(values) < 2**63:
            return {"__ints__": _b64(np.array(values, "<i8"))}
        if kinds == {float}:
            return {"__floats__": _b64(np.array(values, "<f8"))}
    return [encode_value(item) for item in values]


def _b64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


def _encode_tensor(tensor: Any) -> dict[str, Any]:
    import torch

    tensor = tensor.detach().cpu().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    array = tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
    return {"__array__": [array.dtype.str, list(tensor.shape), _b64(array)], "torch": name}


def _to_tensor(array: np.ndarray, dtype: str) -> Any:
    import torch

    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
