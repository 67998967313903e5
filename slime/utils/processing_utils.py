"""Tokenizers, processors and the encoding of images for engines. Heavy packages are imported when first needed."""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from slime.utils.chat_messages import media_messages

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


def load_processor(name_or_path: str, **kwargs: object) -> Any:
    """Load the multimodal processor of a Hugging Face checkpoint, or None for a text-only one."""
    from transformers import AutoProcessor, ProcessorMixin

    try:
        processor = AutoProcessor.from_pretrained(name_or_path, **kwargs)
    except (OSError, ValueError) as e:
        logger.info("%s has no processor: %s", name_or_path, e)
        return None
    return processor if isinstance(processor, ProcessorMixin) else None  # text models get a bare tokenizer


def build_processor_kwargs(multimodal_inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the keyword arguments of a processor call that yields tensors for images and videos, lists for text.

    ``multimodal_inputs`` are passed on; options in it, for images say (``images_kwargs``), are kept.
    """
    kwargs = dict(multimodal_inputs or {})
    kwargs["text_kwargs"] = {**kwargs.get("text_kwargs", {}), **_KEPT_IN_TEXT}
    for kind in ("images_kwargs", "videos_kwargs", "audio_kwargs"):
        kwargs[kind] = {**kwargs.get(kind, {}), "return_tensors": "pt"}
    return kwargs


def process_vision_info(messages: list[dict[str, Any]], processor: object) -> dict[str, Any]:
    """Collect the images and videos of chat messages as ``{"images": list | None, "videos": list | None}``.

    Parts may have any form that is published: ``image``, ``image_url``, ``input_image``, data URLs and so on. Raises
    ValueError for one that holds nothing, and for audio.
    Uses the ``qwen_vl_utils`` package when installed (it resizes as Qwen's models expect); otherwise images are opened
    as they are, and videos raise ImportError.
    """
    messages = media_messages(messages, "a message")
    try:
        from qwen_vl_utils import process_vision_info as qwen_process_vision_info
    except ImportError:
        return {"images": _plain_images(messages), "videos": None}
    patch = getattr(getattr(processor, "image_processor", None), "patch_size", 14)
    images, videos = qwen_process_vision_info(messages, image_patch_size=patch)
    return {"images": images, "videos": videos}


def _plain_images(messages: list[dict[str, Any]]) -> list[Any] | None:
    images = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if part.get("type") == "video":
                raise ImportError("video prompts need the package qwen-vl-utils: pip install qwen-vl-utils")
            if part.get("type") == "image":
                images.append(_open_image(part["image"]))
    return images or None


def _open_image(image: object) -> Any:
    from PIL import Image

    if isinstance(image, dict):  # the Hugging Face datasets form
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return Image.open(io.BytesIO(image)).convert("RGB")
    if isinstance(image, str):
        if image.startswith(("http://", "https://")):
            raise ImportError(
                f"{image:.80} is not downloaded without the package qwen-vl-utils: pip install qwen-vl-utils"
            )
        if image.startswith("data:"):
            return Image.open(io.BytesIO(base64.b64decode(image.partition(",")[2]))).convert("RGB")
        return Image.open(image.removeprefix("file://")).convert("RGB")
    return image


def encode_image_for_rollout_engine(image: PIL.Image.Image) -> str:
    """Return a PIL image as ``data:image/png;base64,...``, in RGB."""
    buffer = io.BytesIO()
    (image if image.mode == "RGB" else image.convert("RGB")).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
