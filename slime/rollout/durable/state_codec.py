"""Samples as JSON: exact, safe to load, and compact for long lists of numbers.

Arrays and tensors become ``{"__array__": [dtype, shape, base64]}`` (tensors with ``"torch": dtype``, others with
``"as": dtype`` where they are stored narrower than they are). Long lists of plain ints or floats become
``{"__packed__": [dtype, base64]}`` in the narrowest dtype that gives every value back bit for bit, or
``{"__repeated__": [value, count]}``; images become base64 PNG. Dictionaries with keys that are no strings become
``{"__items__": [[key, value], ...]}``. Tuples are decoded as lists. Older files have lists as ``__ints__`` and
``__floats__``, 64 bits wide.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.utils.image_tokens import PIXELS_OF_PROCESSOR
from slime.utils.types import Sample

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_LONG = 16
_VERY_LONG = 512
_TAGS = {
    "__array__", "__ints__", "__floats__", "__packed__", "__repeated__", "__bytes__", "__image__", "__escaped__",
    "__items__",
}  # fmt: skip
_KEYS = (str, int, float, bool, type(None))
_ARRAYS = "biufcSUmM"
"""Kinds of dtypes whose name defines them fully."""
_INTS = tuple(
    (dtype, int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    for dtype in map(np.dtype, ("|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8"))
)


_CLASS = "__class__"
"""The key of a sample's class, where it is a subclass of Sample."""


class NotStorable(TypeError):
    """A value that has no form in the state file."""


def encode_group(group: Sample | list[Any], after_long_list: Callable[[], None] = lambda: None) -> Any:
    """Encode a (nested) list of samples; ``after_long_list`` is called after each part that takes long."""
    if isinstance(group, list):
        return [encode_group(item, after_long_list) for item in group]
    return _encode_sample(group, after_long_list)


def decode_group(data: object) -> Any:
    """Inverse of ``encode_group``."""
    if isinstance(data, list):
        return [decode_group(item) for item in data]
    fields = decode_value(data)
    return _class_called(fields.pop(_CLASS, None)).from_dict(fields)


def _encode_sample(sample: Sample, after_long_list: Callable[[], None]) -> dict[str, Any]:
    encoded: dict[str, Any] = {} if type(sample) is Sample else {_CLASS: _name_of(type(sample))}
    fields = sample.to_dict()
    if PIXELS_OF_PROCESSOR in fields:  # 50 times the size of the images, of which the processor makes it again
        fields["multimodal_train_inputs"] = None
    for name, value in fields.items():
        try:
            encoded[name] = _encode_metadata(sample, value) if name == "metadata" else encode_value(value)
            if isinstance(value, list) and len(value) >= _VERY_LONG:
                after_long_list()
        except NotStorable as e:
            if name in Sample.__dataclass_fields__ and name != "trace":
                raise NotStorable(f"sample index={sample.index}: field {name!r} cannot be saved: {e}") from e
            logger.warning("sample index=%s: attribute %r is not saved with the buffer: %s", sample.index, name, e)
    return encoded


def _encode_metadata(sample: Sample, value: object) -> Any:
    """Encode what users noted about a sample, without what has no form in JSON: that must not end a run."""
    try:
        return encode_value(value)
    except NotStorable:
        if not isinstance(value, dict):
            raise
    kept = {}
    for key, item in dict(value).items():
        try:
            encode_value({key: item})
            kept[key] = item
        except NotStorable as e:
            logger.warning("sample index=%s: metadata[%r] is not saved with the buffer: %s", sample.index, key, e)
    return encode_value(kept)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _class_called(name: str | None) -> type[Sample]:
    """Return the subclass of Sample of that name among those that are loaded: no file makes this process import code.

    Of a subclass that is not, samples are decoded as plain ones, with its fields as attributes.
    """
    if name is None:
        return Sample
    kinds = [Sample]
    for kind in kinds:
        if _name_of(kind) == name:
            return kind
        kinds += kind.__subclasses__()
    logger.warning("samples were saved as %s, which is not loaded: they are decoded as Sample", name)
    return Sample


def encode_value(value: Any) -> Any:
    """Return ``value`` as JSON types. Raises NotStorable for objects of other kinds."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return _encode_list(value)
    if isinstance(value, dict):
        return _encode_dict(value)
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode("ascii")}
    if isinstance(value, np.generic) and not isinstance(item := value.item(), np.generic):
        return encode_value(item)
    if isinstance(value, np.ndarray) and value.dtype.kind in _ARRAYS:
        return _encode_array(value)
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        return _encode_tensor(value)
    if type(value).__module__.partition(".")[0] == "PIL":
        from slime.utils.image_tokens import as_png  # the samples of a group have the same images

        return {"__image__": as_png(value)}
    raise NotStorable(f"a {_name_of(type(value))} has no form in the state file")


def _encode_dict(value: dict[Any, Any]) -> dict[str, Any]:
    value = dict(value)  # a pending reward may add to it on another thread
    if all(type(key) is str for key in value):
        encoded = {key: encode_value(item) for key, item in value.items()}
        return {"__escaped__": encoded} if _TAGS & encoded.keys() else encoded
    if odd := [key for key in value if not isinstance(key, _KEYS)]:
        raise NotStorable(f"a {_name_of(type(odd[0]))} as a key has no form in the state file")
    return {"__items__": [[key, encode_value(item)] for key, item in value.items()]}


def decode_value(value: object) -> Any:
    """Inverse of ``encode_value``."""
    if isinstance(value, list):
        return [decode_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "__escaped__" in value:
        return {key: decode_value(item) for key, item in value["__escaped__"].items()}
    if "__items__" in value:
        return {key: decode_value(item) for key, item in value["__items__"]}
    if "__ints__" in value:
        return np.frombuffer(base64.b64decode(value["__ints__"]), "<i8").tolist()
    if "__floats__" in value:
        return np.frombuffer(base64.b64decode(value["__floats__"]), "<f8").tolist()
    if "__packed__" in value:
        dtype, data = value["__packed__"]
        return np.frombuffer(base64.b64decode(data), dtype).tolist()
    if "__repeated__" in value:
        item, count = value["__repeated__"]
        return [item] * count
    if "__bytes__" in value:
        return base64.b64decode(value["__bytes__"])
    if "__array__" in value:
        dtype, shape, data = value["__array__"]
        array = np.frombuffer(base64.b64decode(data), dtype).reshape(shape).astype(value.get("as", dtype))
        return _to_tensor(array, value["torch"]) if "torch" in value else array
    if "__image__" in value:
        from slime.utils.images import reopen_image

        return reopen_image(value["__image__"])
    return {key: decode_value(item) for key, item in value.items()}


def _encode_list(values: list[Any] | tuple[Any, ...]) -> Any:
    if len(values) >= _LONG and len(kinds := set(map(type, values))) == 1:
        packed = _pack(values, kinds.pop())
        if packed is not None:
            return packed
    return [encode_value(item) for item in values]


def _pack(values: list[Any] | tuple[Any, ...], kind: type) -> dict[str, Any] | None:
    """Encode a list of ints or of floats; None for another ``kind`` and for ints of more than 64 bits."""
    if kind is int:
        try:
            array = np.array(values, "<i8")
        except OverflowError:
            return None
        narrow = _narrowest(array)
    elif kind is float:
        array = np.array(values, "<f8")
        with np.errstate(over="ignore"):
            narrow = array.astype("<f4")
        if not (narrow.astype("<f8").view("<i8") == array.view("<i8")).all():  # what engines report loses no bit
            narrow = array
    else:
        return None
    bits = array.view("<i8")
    if (bits == bits[0]).all() and np.isfinite(array[0]):
        return {"__repeated__": [values[0], len(values)]}
    return {"__packed__": [narrow.dtype.str, _b64(narrow)]}


def _narrowest(array: np.ndarray) -> np.ndarray:
    """Return integers in the narrowest dtype that holds them."""
    if not array.size:
        return array
    low, high = int(array.min()), int(array.max())
    for dtype, least, most in _INTS:
        if dtype.itemsize >= array.dtype.itemsize:
            break
        if least <= low and high <= most:
            return array.astype(dtype)
    return array


def _b64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


def _encode_array(array: np.ndarray) -> dict[str, Any]:
    stored = _narrowest(array) if array.dtype.kind in "iu" else array
    encoded: dict[str, Any] = {"__array__": [stored.dtype.str, list(array.shape), _b64(stored)]}
    if stored.dtype != array.dtype:
        encoded["as"] = array.dtype.str
    return encoded


def _encode_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    try:
        tensor = tensor.detach().cpu().contiguous()
        if tensor.dtype == torch.bfloat16:  # its bits are no numbers: not to be narrowed
            array = tensor.view(torch.int16).numpy()
            return {"__array__": [array.dtype.str, list(array.shape), _b64(array)], "torch": name}
        return {**_encode_array(tensor.numpy()), "torch": name}
    except (TypeError, RuntimeError) as e:  # sparse and quantized ones, and dtypes that NumPy has not
        raise NotStorable(f"a tensor of dtype {name} and layout {tensor.layout} has no form in the state file") from e


def _to_tensor(array: np.ndarray, dtype: str) -> Any:
    import torch

    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
