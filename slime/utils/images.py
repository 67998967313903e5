"""Images of prompts, tools and agents. What is broken, too large, or not to be read is an error, and not decoded."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, unquote_to_bytes

from slime.utils.remote_file import RemoteFileError, fetch

if TYPE_CHECKING:
    import PIL.Image

MAX_BYTES = 50 * 2**20
"""Of an encoded image."""
MAX_PIXELS = 64_000_000
"""Of a decoded one: 192 MB in RGB. A small file can hold far more."""
MAX_RATIO = 200
"""Longer side over shorter: processors of Qwen's models refuse more."""
FETCH_DEADLINE_S = 20.0
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""Of encoded images. PIL reads others, of which one starts a program (EPS), and some state a wrong size first."""


class ImageError(ValueError):
    """An image that cannot be used; the message says which and why."""


def open_image(image: object, *, local_files: bool = True) -> Any:
    """Return an image in RGB, from whatever form it has: a PIL image, bytes, ``{"bytes": ..}`` or ``{"path": ..}``, a
    ``data:`` URL, an address or a path. An image of PIL, if it is not too large, and an array are returned as they are.

    Addresses are fetched from public hosts alone; see :func:`slime.utils.remote_file.fetch`. With ``local_files``
    False, for what others send, paths are refused. Raises ImageError for one that is missing, broken or too large.
    """
    if isinstance(image, Mapping):  # the Hugging Face datasets form
        image = image.get("bytes") or image.get("path")
    if isinstance(image, str):
        encoded, name = _bytes_at(image, local_files), f"{image:.80}"
    elif isinstance(image, bytes | bytearray | memoryview):
        encoded, name = bytes(image), f"an image of {len(image)} bytes"
    elif image is None:
        raise ImageError("an image holds neither bytes nor a path")
    else:
        if hasattr(image, "convert") and type(image).__module__.partition(".")[0] == "PIL":
            width, height = cast("PIL.Image.Image", image).size
            check_size(width, height, "an image")
        return image
    if len(encoded) > MAX_BYTES:
        raise ImageError(f"{name} has {len(encoded)} bytes; images may have {MAX_BYTES}")
    return decode(encoded, name)


def reopen_image(url: str) -> Any:
    """Return the image of a ``data:`` URL that ``encode_image_for_rollout_engine`` made: a PNG may have more bytes than
    the file that it was read from, so only the limit of pixels holds."""
    return decode(_of_data_url(url, f"{url:.80}", limit=None), f"{url:.80}")


def decode(encoded: bytes, name: str) -> PIL.Image.Image:
    """Return the image in RGB. Raises ImageError that begins with ``name``."""
    from PIL import Image

    Image.init()
    try:
        # the size is in the file's head: what is too large is never decoded. PIL's own limit is a warning first.
        with Image.open(io.BytesIO(encoded), formats=[one for one in FORMATS if one in Image.OPEN]) as opened:
            check_size(*opened.size, name)
            return opened.convert("RGB")
    except ImageError:
        raise
    except Exception as e:
        raise ImageError(f"{name} is no image that can be read: {type(e).__name__}: {e}") from e


def check_size(width: int, height: int, name: str) -> None:
    """Raise ImageError for an image that has too many pixels, or is too narrow."""
    if width * height > MAX_PIXELS:
        raise ImageError(f"{name} has {width} x {height} pixels; images may have {MAX_PIXELS} in all")
    if min(width, height) < 1 or max(width, height) > MAX_RATIO * min(width, height):
        raise ImageError(f"{name} is {width} x {height}: one side may be {MAX_RATIO} times the other")


def _bytes_at(place: str, local_files: bool) -> bytes:
    name = f"{place:.80}"
    if place.startswith("data:"):
        return _of_data_url(place, name, limit=MAX_BYTES)
    if place.startswith(("http://", "https://")):
        try:
            return fetch(place, MAX_BYTES, FETCH_DEADLINE_S)
        except RemoteFileError as e:
            raise ImageError(str(e)) from e
    if not local_files:
        raise ImageError(f"{name} is no data: URL and no address: files of this host are not read for others")
    path = Path(unquote(place.removeprefix("file://")) if place.startswith("file://") else place)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ImageError(f"{name} has {path.stat().st_size} bytes; images may have {MAX_BYTES}")
        return path.read_bytes()
    except (OSError, ValueError) as e:
        if isinstance(e, ImageError):
            raise
        raise ImageError(f"{name} cannot be read: {getattr(e, 'strerror', None) or e}") from e


def _of_data_url(url: str, name: str, limit: int | None) -> bytes:
    head, comma, data = url.partition(",")
    if not comma:
        raise ImageError(f"{name} is no data: URL: it has no comma")
    if limit is not None and len(data) > limit * 4 // 3 + 4:
        raise ImageError(f"{name} has {len(data)} characters; images may have {limit} bytes")
    if not head.endswith(";base64"):
        return unquote_to_bytes(data)
    try:
        return base64.b64decode("".join(unquote(data).split()), validate=True)
    except (binascii.Error, ValueError) as e:
        raise ImageError(f"{name} is not base64: {e}") from e
