"""Images of samples, in requests and replies.

A sample's ``tokens`` have as many placeholders for an image as its features, which is what the trainer sees. Requests
have one for each image: engines answer ids that are expanded already with an error, or never.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from slime.utils.image_tokens import (
    PIXELS_OF_PROCESSOR,
    PROMPT_IMAGES,
    as_png,
    collapsed,
    expanded,
    forbidden_ids,
    joined,
    placeholder,
    placeholder_id,
)

if TYPE_CHECKING:
    from slime.utils.types import Sample

_workers = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="images")
_being_made: dict[Hashable, asyncio.Future[None]] = {}


def images_of(sample: Sample) -> list[Any]:
    """Return the images of a sample, those of the prompt and of later turns, in order."""
    return list((sample.multimodal_inputs or {}).get("images") or [])


async def prepare(state: Any, sample: Sample) -> None:
    """Make what requests and trainer need of the images of ``sample``, in a thread, and once for all its group: it
    takes longer than an event loop should stand still."""
    images = images_of(sample)
    if not images or getattr(state, "processor", None) is None:
        return
    prompt = None if sample.tokens or not isinstance(sample.prompt, str) else sample.prompt

    def work() -> None:
        for image in images:
            as_png(image)
        if prompt is not None:
            expanded(state, prompt, sample.multimodal_inputs)

    key = (id(state), prompt, *map(id, images))
    future = _being_made.get(key)
    if future is None or future.get_loop() is not asyncio.get_running_loop():
        future = _being_made[key] = asyncio.get_running_loop().run_in_executor(_workers, work)
        future.add_done_callback(lambda _: _being_made.pop(key, None))
    await asyncio.wait([future])  # what it raises is raised again where the result is needed


def request_fields(state: Any, sample: Sample) -> dict[str, Any]:
    """Return ``input_ids``, and ``image_data`` where there are images, of the request for the rest of ``sample``."""
    images = images_of(sample)
    if not images:
        return {"input_ids": list(sample.tokens)}  # the sample's own list grows while requests are repeated
    name = f"sample index={sample.index}"
    if getattr(state, "processor", None) is None:
        raise ValueError(f"{name} has images, and no processor is loaded for them: give --multimodal-keys")
    return {
        "input_ids": collapsed(sample.tokens, placeholder_id(state), len(images), name),
        "image_data": [as_png(image) for image in images],
    }


def check_prompt(sample: Sample, meta_info: Mapping[str, Any]) -> None:
    """Raise RuntimeError unless the engine made as many tokens of the images of a request as ``sample`` has."""
    counted = meta_info.get("prompt_tokens")
    if counted is not None and counted != len(sample.tokens) and images_of(sample):
        raise RuntimeError(
            f"sample index={sample.index}: the engine made {counted} tokens of the prompt, which has "
            f"{len(sample.tokens)} here: it prepares images otherwise. Both must have the same processor files and "
            "--sglang-image-processor-backend"
        )


def check_sampled(state: Any, sample: Sample, tokens: Sequence[int]) -> None:
    """Raise RuntimeError for generated ``tokens`` with a placeholder, which would be taken for an image."""
    if found := set(forbidden_ids(state)).intersection(tokens):
        raise RuntimeError(
            f"sample index={sample.index}: the engine generated token {min(found)}, a placeholder of images or videos, "
            "against the request's logit_bias"
        )


def add_images(sample: Sample, images: Sequence[Any], inputs: Mapping[str, Any]) -> None:
    """Let ``sample`` have further images, and what the processor made of them, in new objects: the samples of a group
    share those of their prompt."""
    if not images:
        return
    had, made = images_of(sample), sample.multimodal_train_inputs
    sample.__dict__.setdefault(PROMPT_IMAGES, len(had))
    sample.multimodal_inputs = {**(sample.multimodal_inputs or {}), "images": [*had, *images]}
    ours = PIXELS_OF_PROCESSOR in sample.__dict__
    if not (ours and made is None):  # else it comes from a state file, and all is made when it is complete
        sample.multimodal_train_inputs = joined(made, inputs)
    if ours or not had:
        setattr(sample, PIXELS_OF_PROCESSOR, True)


def set_train_inputs(sample: Sample, inputs: dict[str, Any]) -> None:
    """Let ``sample`` have what the processor made of its images: the state files leave it out."""
    sample.multimodal_train_inputs = inputs or None
    if inputs:
        setattr(sample, PIXELS_OF_PROCESSOR, True)
    else:  # of a response that is made again
        sample.__dict__.pop(PIXELS_OF_PROCESSOR, None)


def complete(samples: Iterable[Sample], state: Callable[[], Any]) -> None:
    """Make again what state files leave out of samples with images. ``state`` is called when it is needed."""
    for sample in samples:
        if sample.multimodal_train_inputs is None and PIXELS_OF_PROCESSOR in sample.__dict__:
            reader = state()
            text = placeholder(reader) * len(images_of(sample))
            _, sample.multimodal_train_inputs = expanded(reader, text, sample.multimodal_inputs)
