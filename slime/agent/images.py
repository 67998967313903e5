"""Images in the conversations of agents: taken from requests, sent to engines, kept for the samples.

In messages an image is its digest, so that conversations are compared by it. Token ids have one placeholder for each
image, as in requests to engines, until they become samples.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.utils.image_tokens import PIXELS_OF_PROCESSOR, PROMPT_IMAGES, Reader, image_lengths, placeholder
from slime.utils.images import ImageError, open_image, reopen_image
from slime.utils.processing_utils import encode_image_for_rollout_engine, expanded_length
from slime.utils.types import Sample

MOST_IMAGES = 64
"""Of one request."""
MOST_BYTES = 256 * 2**20
"""Of the images of a session, as PNG in base64."""


@dataclass(frozen=True)
class Seen:
    """An image as requests to engines have it, and how many tokens it is there."""

    png: str
    length: int


@dataclass
class SessionImages:
    """The images of a session by digest."""

    seen: dict[str, Seen] = field(default_factory=dict)
    sources: dict[bytes, str] = field(default_factory=dict)
    """Digest of what a request had (data or an address) -> that of the image."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)  # requests of a session may overlap

    def extra(self, images: Sequence[str]) -> int:
        """Return how many more tokens than placeholders ``images`` are."""
        return sum(self.seen[image].length - 1 for image in images)

    def take(self, reader: Reader, source: object) -> str:
        """Return the digest of the image at ``source``: of data, or an address that is fetched. Raises ImageError.

        Not in an event loop: it fetches, decodes and encodes.
        """
        if not isinstance(source, str):
            raise ImageError("an image must be a data: URL, base64 data, or the address of an image")
        known = hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()
        if known not in self.sources:
            image = open_image(source, local_files=False)
            png = encode_image_for_rollout_engine(image)
            digest = hashlib.sha256(png.encode()).hexdigest()[:32]
            length = expanded_length(reader.processor, reader.tokenizer, placeholder(reader), {"images": [image]})
            with self._lock:
                held = sum(len(one.png) for name, one in self.seen.items() if name != digest)
                if held + len(png) > MOST_BYTES:
                    raise ImageError(f"the images of a session may have {MOST_BYTES} bytes, as PNG in base64")
                self.seen.setdefault(digest, Seen(png, length))
                self.sources[known] = digest
        return self.sources[known]

    def messages(self, reader: Reader, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
        """Return ``messages`` with digests for images, and those in order. Raises ImageError."""
        found: list[str] = []

        def part_of(part: dict[str, Any]) -> dict[str, Any]:
            if part["type"] != "image":
                return part
            if len(found) >= MOST_IMAGES:
                raise ImageError(f"a request may have {MOST_IMAGES} images")
            found.append(self.take(reader, part["image"]))
            return {"type": "image", "image": found[-1]}

        translated = []
        for message in messages:
            content = message.get("content")
            parts = {"content": [part_of(part) for part in content]} if isinstance(content, list) else {}
            translated.append({**message, **parts})
        return translated, found

    def show(self, reader: Reader, samples: Sequence[Sample], *, pixels: bool) -> None:
        """Let ``samples``, which have digests, have their images, and with ``pixels`` what the trainer gets of them."""
        opened: dict[str, Any] = {}
        for sample in samples:
            digests = (sample.multimodal_inputs or {}).get("images") or []
            if not digests:
                continue
            for digest in digests:
                if digest not in opened:
                    opened[digest] = reopen_image(self.seen[digest].png)
            sample.multimodal_inputs = {"images": [opened[digest] for digest in digests]}
            setattr(sample, PROMPT_IMAGES, 0)
            setattr(sample, PIXELS_OF_PROCESSOR, True)
            if pixels:
                _, sample.multimodal_train_inputs = image_lengths(reader, sample.multimodal_inputs)
