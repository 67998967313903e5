"""Placeholders of images among token ids: one for each feature where a trainer reads them, one for each image in a
request to an engine, which expands it again. Nothing that was generated is tokenized again.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

from slime.utils.processing_utils import build_processor_kwargs, encode_image_for_rollout_engine, train_inputs

FORBIDDEN = -1000.0
"""Added to the logit of a placeholder: its probability is 0 in fp32, and log-probs are those of the distribution
without it."""
PROMPT_IMAGES = "prompt_images"
"""The attribute of a sample that got images after its prompt: how many the prompt had."""
PIXELS_OF_PROCESSOR = "pixels_of_processor"
"""The attribute of a sample whose ``multimodal_train_inputs`` are what the processor makes of its images."""
FORBIDDEN_IDS = "slime_forbidden_ids"
MOST_PIXELS = 80_000_000
T = TypeVar("T")


class PlacesError(ValueError):
    """A text with more or fewer placeholders than it has images."""


class Reader(Protocol):
    """An object with the tokenizer and the processor of a checkpoint."""

    tokenizer: Any
    processor: Any


class OfImages:
    """Results by the images that they were made of, the latest ones: samples of a group have the same images.

    Images are not changed in place. At most ``kept`` results stay, of images with ``MOST_PIXELS`` in all.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._made: dict[Hashable, tuple[Sequence[Any], Any]] = {}
        self._pixels = 0
        self._lock = threading.Lock()

    def of(self, key: Hashable, images: Sequence[Any], make: Callable[[], T]) -> T:
        """Return what ``make`` returns for ``key`` and ``images``, made once."""
        full = (key, *map(id, images))
        if (held := self._made.get(full)) is not None:
            return cast("T", held[1])
        made, pixels = make(), _pixels(images)
        with self._lock:
            if full in self._made or pixels > MOST_PIXELS:
                return made
            while len(self._made) >= self._kept or self._pixels + pixels > MOST_PIXELS:
                self._pixels -= _pixels(self._made.pop(next(iter(self._made)))[0])
            self._made[full] = (images, made)  # which keeps the images, and their ids, alive
            self._pixels += pixels
        return made


def _pixels(images: Sequence[Any]) -> int:
    sizes = (image.size for image in images if isinstance(getattr(image, "size", None), tuple))
    return sum(size[0] * size[1] for size in sizes)


_expanded, _encoded = OfImages(16), OfImages(128)


def placeholder(reader: Reader) -> str:
    """Return the token of which every image has one in a request, as text."""
    found = getattr(reader.processor, "image_token", None)
    if not isinstance(found, str):
        raise ValueError(
            f"{type(reader.processor).__name__} names no image_token: its images cannot be sent to engines"
        )
    return found


def placeholder_id(reader: Reader) -> int:
    """Return the id of the placeholder of images."""
    found = getattr(reader.processor, "image_token_id", None)
    return int(reader.tokenizer.convert_tokens_to_ids(placeholder(reader)) if found is None else found)


def forbidden_ids(reader: Reader | None) -> list[int]:
    """Return the ids that stand for images and videos, which the model must not sample: engine and trainer would count
    one image too many. None where no media are read."""
    processor = getattr(reader, "processor", None)
    if reader is None or processor is None:
        return []
    found = [getattr(processor, f"{kind}_token_id", None) for kind in ("image", "video", "audio")]
    if isinstance(getattr(processor, "image_token", None), str):
        found.append(placeholder_id(reader))
    return sorted({one for one in found if isinstance(one, int)})


def without_placeholders(payload: Mapping[str, Any], ids: Sequence[int]) -> dict[str, Any]:
    """Return the body of a request under which no placeholder is sampled.

    Routers drop ``logit_bias``: engines that run slime's plugin read the ids among the labels, which routers pass on.
    """
    if not ids:
        return dict(payload)
    params = payload["sampling_params"]
    bias = {**(params.get("logit_bias") or {}), **{str(one): FORBIDDEN for one in ids}}
    labels = {**(payload.get("custom_labels") or {}), FORBIDDEN_IDS: ",".join(map(str, ids))}
    return {**payload, "sampling_params": {**params, "logit_bias": bias}, "custom_labels": labels}


def expanded(reader: Reader, text: str, inputs: Mapping[str, Any] | None) -> tuple[list[int], dict[str, Any]]:
    """Return the ids of ``text``, with as many placeholders for each image as it has features, and the trainer's
    tensors, which samples share. Raises PlacesError unless ``text`` has a placeholder for each image."""
    inputs = dict(inputs or {})
    images = list(inputs.get("images") or [])
    if not images:
        inputs.pop("images", None)  # processors take no empty list
    token = getattr(reader.processor, "image_token", None)
    if isinstance(token, str) and (places := text.count(token)) != len(images):
        raise PlacesError(f"a text has {places} times {token}, the placeholder of images, and {len(images)} images")

    def make() -> tuple[list[int], dict[str, Any]]:
        outputs = reader.processor(text=text, **build_processor_kwargs(inputs))
        return list(outputs["input_ids"][0]), train_inputs(outputs)

    rest = repr(sorted((k, v) for k, v in inputs.items() if k != "images" and v is not None))
    ids, made = _expanded.of((text, rest), [reader.processor, *images], make)
    return list(ids), dict(made)


def image_lengths(reader: Reader, inputs: Mapping[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """Return how many placeholders each image of ``inputs`` has, and the trainer's tensors."""
    pad = placeholder_id(reader)
    text = "\n".join([placeholder(reader)] * len(inputs["images"]))
    ids, made = expanded(reader, text, inputs)
    return [len(list(run)) for token, run in itertools.groupby(ids) if token == pad], made


def with_lengths(
    tokens: Sequence[int], pad: int, lengths: Sequence[int], beside: Sequence[T], name: str
) -> tuple[list[int], list[T]]:
    """Return ``tokens``, with one ``pad`` for each image, and what is ``beside`` each of them, expanded to ``lengths``.

    Raises ValueError, which begins with ``name``, when there are not as many pads.
    """
    if (places := list(tokens).count(pad)) != len(lengths):
        raise ValueError(f"{name} has {len(lengths)} images and {places} places for images among its tokens")
    left = iter(lengths)
    counts = [next(left) if token == pad else 1 for token in tokens]
    return (
        [token for token, count in zip(tokens, counts, strict=True) for _ in range(count)],
        [value for value, count in zip(beside, counts, strict=True) for _ in range(count)],
    )


def as_png(image: Any) -> str:
    """Return an image as requests have it."""
    return _encoded.of("png", [image], lambda: encode_image_for_rollout_engine(image))


def collapsed(tokens: Sequence[int], pad: int, images: int, name: str) -> list[int]:
    """Return ``tokens`` with one ``pad`` for each of the ``images``. Raises ValueError, which begins with ``name``,
    when they are not as many."""
    found = [token for i, token in enumerate(tokens) if token != pad or i == 0 or tokens[i - 1] != pad]
    if (places := found.count(pad)) != images:
        raise ValueError(f"{name} has {images} images and {places} places for images among its tokens")
    return found


def joined(one: Mapping[str, Any] | None, other: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a processor made of earlier and of later images: tensors, one after the other by name."""
    import torch

    both = [inputs for inputs in (one, other) if inputs]
    return {
        key: torch.cat([inputs[key] for inputs in both if key in inputs])
        for key in dict.fromkeys(key for inputs in both for key in inputs)
    }


class WithImages:
    """A tokenizer that lets the processor tokenize text with images in it: one placeholder becomes as many as the image
    has features."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.image = placeholder(reader)
        self._shown: list[Any] = []
        self.inputs: dict[str, Any] = {}
        """The tensors that the processor made of the images of the text that came last."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader.tokenizer, name)

    def show(self, images: Sequence[Any]) -> list[Any]:
        """The text that comes next has ``images``, which are returned."""
        self._shown, self.inputs = list(images), {}
        return self._shown

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of ``text``, and keep what the processor made of its images."""
        if self.image not in text:
            return list(self._reader.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        ids, self.inputs = expanded(self._reader, text, {"images": self._shown})
        return ids

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        """Return the text of ``ids``, with one placeholder for each image."""
        text = str(self._reader.tokenizer.decode(ids, **options))
        return re.sub(f"(?:{re.escape(self.image)})+", lambda _: self.image, text)
