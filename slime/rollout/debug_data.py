"""Rollouts on disk: ``torch.save`` of ``{"rollout_id", "samples": [Sample.to_dict()]}``, safe to load."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slime.arguments.args import Args
from slime.utils.atomic_file import replacing
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_IMAGE = "__image__"
_PLAIN = (type(None), bool, int, float, str, bytes)


def save_rollout(path: str | os.PathLike[str], rollout_id: int, samples: Sequence[Sample]) -> None:
    """Write a dump, whole or not at all.

    Arrays become tensors and images PNGs, so that it loads with ``weights_only=True``. Attributes of other types are
    left out with a warning; in a field of Sample they raise TypeError.
    """
    import torch

    data = {"rollout_id": rollout_id, "samples": [_plain_sample(sample) for sample in samples]}
    with replacing(path) as temporary:
        torch.save(data, temporary)


def load_rollout(path: str | os.PathLike[str], subsample_ratio: float | None = None) -> list[Sample]:
    """Return the samples of a dump, or with ``subsample_ratio`` some from both of its ends.

    Only plain values, tensors and numpy arrays are unpickled. Raises FileNotFoundError, and ValueError for anything
    else than a dump.
    """
    import torch

    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no rollout dump at {path}")
    try:
        with torch.serialization.safe_globals(numpy_globals()):
            data = torch.load(path, map_location="cpu", weights_only=True)
        samples = [Sample.from_dict(_restore(entry)) for entry in data["samples"]]
    except Exception as e:
        raise ValueError(
            f"{path} is not a rollout dump that can be read safely (a dict with 'samples' of plain values, tensors and "
            f"arrays): {type(e).__name__}: {e}"
        ) from e
    return samples if subsample_ratio is None else subsample(samples, subsample_ratio)


def save_tokenizer(args: Args) -> None:
    """Write tokenizer and processor of the run beside its dumps: ``<--dump-details>/tokenizer`` and ``processor``."""
    from slime.utils.processing_utils import load_processor, load_tokenizer

    assert args.dump_details is not None
    trust = {"trust_remote_code": args.trust_remote_code}
    load_tokenizer(args.hf_checkpoint, **trust).save_pretrained(Path(args.dump_details) / "tokenizer")
    processor = load_processor(args.hf_checkpoint, backend=args.sglang_image_processor_backend, **trust)
    if processor is not None:
        processor.save_pretrained(Path(args.dump_details) / "processor")


def subsample(samples: list[Sample], ratio: float) -> list[Sample]:
    """Keep ``int(len * ratio)`` samples: the first half of that number and the rest from the end."""
    count = int(len(samples) * ratio)
    return samples[: count // 2] + samples[-count // 2 :] if count else []


def numpy_globals() -> list[Any]:
    """Return the objects that pickles of numpy arrays refer to (dumps of slime <= 0.3.1 hold some)."""
    kinds = ("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64")
    multiarray = importlib.import_module("numpy._core.multiarray")
    functions = [multiarray._reconstruct, multiarray.scalar]
    before_numpy_2 = [(f, f"numpy.core.multiarray.{f.__name__}") for f in functions]
    return [np.ndarray, np.dtype, *functions, *before_numpy_2, *(type(np.dtype(k)) for k in kinds)]


def _plain_sample(sample: Sample) -> dict[str, Any]:
    plain = {}
    for name, value in sample.to_dict().items():
        try:
            plain[name] = _plain_value(value)
        except TypeError as e:
            if name in Sample.__dataclass_fields__ and name != "trace":
                raise TypeError(f"sample index={sample.index}: field {name!r} cannot be dumped: {e}") from e
            logger.warning("sample index=%s: attribute %r is left out of the dump: %s", sample.index, name, e)
    return plain


def _plain_value(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in _PLAIN:
        return value
    if isinstance(value, str):  # a StrEnum, say: its class would have to be imported to read the dump
        return str.__str__(value)
    if isinstance(value, bytes):
        return bytes(value)
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, (list, tuple)):
        return [_plain_value(item) for item in value]
    if isinstance(value, dict):
        return {_plain_key(key): _plain_value(item) for key, item in value.items()}
    if type(value).__module__.partition(".")[0] == "PIL":
        from slime.utils.processing_utils import encode_image_for_rollout_engine

        return {_IMAGE: encode_image_for_rollout_engine(value)}
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} is no plain value")


def _plain_key(key: object) -> Any:
    return tuple(map(_plain_key, key)) if isinstance(key, tuple) else _plain_value(key)


def _restore(value: object) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_IMAGE}:
            from slime.utils.images import reopen_image

            return reopen_image(value[_IMAGE])
        return {key: _restore(item) for key, item in value.items()}
    return [_restore(item) for item in value] if isinstance(value, list) else value
