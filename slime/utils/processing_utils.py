"""Tokenizers, processors and the encoding of images for engines. Heavy packages are imported when first needed."""

from __future__ import annotations

import base64
import io
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slime.utils.chat_messages import media_messages
from slime.utils.images import open_image

if TYPE_CHECKING:
    import PIL.Image

    class Tokenizer(Protocol):
        """The methods of a Hugging Face tokenizer that slime calls."""

        def __call__(self, text: str | Sequence[str], **options: object) -> Mapping[str, Any]: ...
        def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
        def decode(self, token_ids: list[int]) -> Any: ...

    class Processor(Protocol):
        """The methods of a multimodal Hugging Face processor that slime calls."""

        def __call__(self, *, text: str, **options: object) -> Mapping[str, Any]: ...


logger = logging.getLogger(__name__)

_KEPT_IN_TEXT = {"return_tensors": None, "return_token_type_ids": False}
_MEDIA = {"images", "videos"}
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""Outputs of processors that say nothing that the ids do not."""


def load_tokenizer(name_or_path: str, **kwargs: object) -> Any:
    """Load the tokenizer of a Hugging Face checkpoint. Raises ValueError naming the path when there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name_or_path, **kwargs)
    except (OSError, ValueError) as e:
        raise ValueError(
            f"no tokenizer could be loaded from {name_or_path!r}: {e}. --hf-checkpoint must hold tokenizer files; "
            "add --trust-remote-code if the tokenizer is code of the checkpoint and you trust it."
        ) from e


def load_processor(name_or_path: str, *, backend: str = "pil", **kwargs: object) -> Any:
    """Load the multimodal processor of a Hugging Face checkpoint, or None for a text-only one.

    ``backend`` makes the pixels of images: ``pil``, or ``torchvision`` (``auto``: where it is installed). They differ,
    so it is to be that of the engines, ``--sglang-image-processor-backend``. Without torchvision the processor takes
    no videos.
    """
    from transformers import AutoProcessor, ProcessorMixin

    try:
        processor = AutoProcessor.from_pretrained(name_or_path, **kwargs)
    except ImportError:
        processor = _without_videos(name_or_path, backend, kwargs)
    except (OSError, ValueError) as e:
        logger.info("%s has no processor: %s", name_or_path, e)
        return None
    if not isinstance(processor, ProcessorMixin):
        return None  # text models get a bare tokenizer
    images = getattr(processor, "image_processor", None)
    if backend != "auto" and images is not None and getattr(images, "backend", backend) != backend:
        setattr(processor, "image_processor", _image_processor(name_or_path, backend, kwargs))  # noqa: B010
    return processor


class _WithoutVideos:
    """Before a class of processors: its part for videos, which needs torchvision, is left out."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return [name for name in super().get_attributes() if name != "video_processor"]  # type: ignore[misc]


def _without_videos(name_or_path: str, backend: str, kwargs: dict[str, Any]) -> Any:
    from transformers.models.auto.processing_auto import processor_class_from_name

    name = _processor_class_name(name_or_path, kwargs)
    cls = processor_class_from_name(name) if name else None
    if cls is None:
        raise ImportError(
            f"the processor of {name_or_path!r} needs torchvision, which is not installed: pip install torchvision"
        )
    tokenizer = load_tokenizer(name_or_path, **kwargs)
    made = type(cls.__name__, (_WithoutVideos, cls), {})
    return made(
        image_processor=_image_processor(name_or_path, "pil" if backend == "auto" else backend, kwargs),
        tokenizer=tokenizer,
        chat_template=getattr(tokenizer, "chat_template", None),
    )


def _processor_class_name(name_or_path: str, kwargs: dict[str, Any]) -> str | None:
    """Return the class that the files of a checkpoint name, else that of its model type."""
    from transformers import AutoConfig
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
    from transformers.utils import cached_file

    for file in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        path = cached_file(name_or_path, file, _raise_exceptions_for_missing_entries=False)
        if path is not None and (found := json.loads(Path(path).read_text()).get("processor_class")):
            return str(found)
    config = AutoConfig.from_pretrained(name_or_path, **kwargs)
    return PROCESSOR_MAPPING_NAMES.get(config.model_type)


def _image_processor(name_or_path: str, backend: str, kwargs: dict[str, Any]) -> Any:
    # Not from the package's root, where the class needs torchvision.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(name_or_path, backend=backend, **kwargs)


def build_processor_kwargs(multimodal_inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the keyword arguments of a processor call that yields tensors for images and videos, lists for text.

    ``multimodal_inputs`` are passed on; options in it, for images say (``images_kwargs``), are kept.
    """
    kwargs = dict(multimodal_inputs or {})
    kwargs["text_kwargs"] = {**kwargs.get("text_kwargs", {}), **_KEPT_IN_TEXT}
    for kind in ("images_kwargs", "videos_kwargs", "audio_kwargs"):
        kwargs[kind] = {**kwargs.get(kind, {}), "return_tensors": "pt"}
    return kwargs


def expanded_length(processor: Processor, tokenizer: Tokenizer, text: str, inputs: Mapping[str, Any] | None) -> int:
    """Return how many tokens the processor makes of ``text`` and its images; of their sizes alone where it can."""
    images = (inputs or {}).get("images") or []
    of_sizes = getattr(processor, "_get_num_multimodal_tokens", None)
    if of_sizes is not None and all(hasattr(image, "height") for image in images) and set(inputs or ()) <= _MEDIA:
        counts = of_sizes(image_sizes=[(image.height, image.width) for image in images])["num_image_tokens"]
        ids = tokenizer([text], add_special_tokens=False)["input_ids"][0]
        return len(ids) + sum(int(count) - 1 for count in counts)
    return len(processor(text=text, **build_processor_kwargs(dict(inputs or {})))["input_ids"][0])


def train_inputs(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a trainer needs of a processor's outputs besides the ids: pixels and grids."""
    return {key: value for key, value in outputs.items() if key not in _OF_TEXT}


def process_vision_info(messages: list[dict[str, Any]], processor: object) -> dict[str, Any]:
    """Collect the images and videos of chat messages as ``{"images": list | None, "videos": list | None}``.

    Parts may have any form that is published: ``image``, ``image_url``, ``input_image``, data URLs and so on. Raises
    ValueError for one that holds nothing, for an image that ``open_image`` refuses, and for audio.
    Uses the ``qwen_vl_utils`` package when installed (it resizes as Qwen's models expect); otherwise images are opened
    as they are, and videos raise ImportError.
    """
    messages = [_with_open_images(message) for message in media_messages(messages, "a message")]
    try:
        from qwen_vl_utils import process_vision_info as qwen_process_vision_info
    except ImportError:
        return {"images": _plain_images(messages), "videos": None}
    patch = getattr(getattr(processor, "image_processor", None), "patch_size", 14)
    images, videos = qwen_process_vision_info(messages, image_patch_size=patch)
    return {"images": images, "videos": videos}


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _with_open_images(message: dict[str, Any]) -> dict[str, Any]:
    """Open the images of a message here: the package would fetch from any address, and knows no limits."""
    if not any(part.get("type") == "image" for part in _parts(message)):
        return message
    parts = [
        {**part, "image": open_image(part["image"])} if part.get("type") == "image" else part
        for part in _parts(message)
    ]
    return {**message, "content": parts}


def _plain_images(messages: list[dict[str, Any]]) -> list[Any] | None:
    images = []
    for message in messages:
        for part in _parts(message):
            if part.get("type") == "video":
                raise ImportError("video prompts need the package qwen-vl-utils: pip install qwen-vl-utils")
            if part.get("type") == "image":
                images.append(part["image"])
    return images or None


def encode_image_for_rollout_engine(image: PIL.Image.Image) -> str:
    """Return a PIL image as ``data:image/png;base64,...``, in RGB."""
    buffer = io.BytesIO()
    (image if image.mode == "RGB" else image.convert("RGB")).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
