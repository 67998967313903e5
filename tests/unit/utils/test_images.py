"""Images that are broken, missing, huge, or not ours to read: refused, by name, before they are decoded."""

from __future__ import annotations

import base64
import io
import struct
import tracemalloc
import zlib

import pytest
from PIL import Image

from slime.utils import images
from slime.utils.data import Dataset
from slime.utils.images import ImageError, open_image
from tests.support.vision import Processor, VisionTokenizer


def png(width: int = 2, height: int = 1) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (10, 20, 30)).save(buffer, format="PNG")
    return buffer.getvalue()


def eps() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (2, 1)).save(buffer, format="EPS")
    return buffer.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG whose head says ``width`` x ``height``; the little that follows would be that much when it is decoded."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1 << 16), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (b"", "is no image that can be read: UnidentifiedImageError"),
        (b"no image", "is no image that can be read: UnidentifiedImageError"),
        (png(300, 300)[:-40], "is no image that can be read: "),
        (png().replace(b"IDAT", b"IDAX"), "is no image that can be read: "),
        (url(b"no image"), "is no image that can be read"),
        ("data:image/png;base64,####", "is not base64"),
        ("data:image/png", "has no comma"),
        ({"bytes": None, "path": None}, "holds neither bytes nor a path"),
        ({"path": "/nowhere/a.png"}, "/nowhere/a.png cannot be read: No such file or directory"),
        ("file:///nowhere/b%20c.png", "file:///nowhere/b%20c.png cannot be read"),
        ("a\0b.png", "cannot be read"),
        ("/", "/ cannot be read: Is a directory"),
        (bomb(60000, 60000), "is no image that can be read: DecompressionBombError"),
        (bomb(9000, 9000), "has 9000 x 9000 pixels; images may have 64000000"),
        (bomb(2000, 2), "is 2000 x 2: one side may be 200 times the other"),
        ("ftp://a.example/b.png", "cannot be read"),
        (eps(), "is no image that can be read: UnidentifiedImageError"),  # PIL has Ghostscript run what it says
        (Image.new("L", (402, 2)), "an image is 402 x 2: one side may be 200 times the other"),
    ],
)
def test_what_is_no_image(image, message):
    with pytest.raises(ImageError) as caught:
        open_image(image)
    assert message in str(caught.value)


@pytest.mark.parametrize("side", [9000, 60000])
def test_a_bomb_is_not_decoded(side):
    data = bomb(side, side)
    tracemalloc.start()
    with pytest.raises(ImageError):
        open_image(data)
    assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    tracemalloc.stop()


def test_encoded_images_have_a_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(images, "MAX_BYTES", 50)
    (tmp_path / "a.png").write_bytes(png())
    for image in (png(), url(png()), str(tmp_path / "a.png"), f"file://{tmp_path}/a.png"):
        with pytest.raises(ImageError, match="images may have 50"):
            open_image(image)


def test_files_of_this_host_are_not_for_others(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(png())
    for place in (str(path), f"file://{path}", "a.png"):
        with pytest.raises(ImageError, match="files of this host are not read for others"):
            open_image(place, local_files=False)
    assert open_image(url(png()), local_files=False).size == (2, 1)


def test_what_can_be_read(tmp_path):
    (tmp_path / "b c.png").write_bytes(png())
    forms = [png(), memoryview(png()), {"bytes": png(), "path": "x"}, {"path": str(tmp_path / "b c.png")}, url(png()),
             f"file://{tmp_path}/b%20c.png", "data:image/png;base64," + base64.encodebytes(png()).decode()]  # fmt: skip
    assert {(image.mode, image.size, image.getpixel((1, 0))) for image in map(open_image, forms)} == {
        ("RGB", (2, 1), (10, 20, 30))
    }
    ready = Image.new("L", (1, 1))
    assert open_image(ready) is ready


@pytest.mark.parametrize("broken", ["data:image/png;base64,AAAA", "/nowhere.png", "http://127.0.0.1:1/a.png"])
def test_rows_with_bad_images_are_named(tmp_path, broken):
    path = tmp_path / "rows.jsonl"
    good = url(png(56, 56))
    path.write_text(
        "".join(f'{{"q": "<image>?", "images": ["{image}"]}}\n' for image in (good, broken)), encoding="utf-8"
    )
    with pytest.raises(ValueError, match=r"rows\.jsonl.*2.*its media cannot be read"):
        Dataset(
            str(path), VisionTokenizer(), Processor(), None, prompt_key="q", multimodal_keys={"image": "images"},
            apply_chat_template=True,
        )  # fmt: skip
