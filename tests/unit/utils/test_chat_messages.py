"""Messages in the forms that people publish, in prompt files and conversations."""

from __future__ import annotations

import base64
import io
import json

import pytest

from slime.utils import images as images_module
from slime.utils.chat_messages import media_messages, text_messages
from slime.utils.data import Dataset, build_messages
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.processing_utils import process_vision_info
from tests.unit.utils.test_mask_templates import tokenizers

CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"c": "P"}}}]}
CONVERSATION = [{"role": "user", "content": "w"}, CALL, {"role": "tool", "content": "1"}]


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def dataset(path, tokenizer=None, **options):
    return Dataset(path, tokenizer, None, options.pop("max_length", None), prompt_key="prompt", **options)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_5_think"])
def test_calls_without_content_are_rendered(name, tmp_path):
    tokenizer = tokenizers(name, tmp_path)[0]
    path = write(tmp_path / "x.jsonl", {"prompt": CONVERSATION})
    text = dataset(path, tokenizer, apply_chat_template=True)[0].prompt
    assert text == tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    assert "f" in text.partition("<tool_call>")[2]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user"}, "message 1 must have a role and a content"),
        ({"role": "user", "content": None}, "message 1 must have a role and a content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "message 1 must have a role and a content"),
        ({"role": "user", "content": 5}, "the content of message 1 must be text or a list of parts, got 5"),
        ({"role": "user", "content": {"type": "text", "text": "x"}}, "must be text or a list of parts, got {'type'"),
    ],
)
def test_messages_that_templates_leave_out_are_refused(message, said, tmp_path):
    path = write(tmp_path / "x.jsonl", {"prompt": "a"}, {"prompt": [{"role": "user", "content": "a"}, message]})
    with pytest.raises(ValueError, match=r"x\.jsonl line 2: column 'prompt'") as raised:
        dataset(path, tokenizers("qwen3", tmp_path)[0], apply_chat_template=True)
    assert said in str(raised.value)


PARTS = [
    [{"type": "text", "text": "1+1"}, {"type": "text", "text": "=?"}],
    [{"type": "input_text", "text": "1+1"}, "=?"],
    [{"type": "text", "text": "1+1=", "image": None}, {"text": "?"}],
]


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_5_think", "qwen2_5_vl"])
def test_parts_of_text_are_one_text(name, parts, tmp_path):
    tokenizer = tokenizers(name, tmp_path)[0]
    data = dataset(
        write(tmp_path / "x.jsonl", {"prompt": [{"role": "user", "content": parts}]}),
        tokenizer,
        apply_chat_template=True,
    )
    plain = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1=?"}], tokenize=False, add_generation_prompt=True
    )
    assert data[0].prompt == plain
    generator = MultiTurnLossMaskGenerator(tokenizer)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": parts}]
    trained = generator.get_text_from_loss_mask(*generator.get_loss_mask(messages))
    assert trained[0].endswith("1+1=?<|im_end|>\n")


URL = "https://example.org/a.png"
MEDIA = [
    {"type": "image_url", "image_url": {"url": URL}},
    {"type": "image_url", "image_url": URL},
    {"type": "input_image", "image_url": URL},
    {"type": "image", "image": URL},
    {"type": "image", "url": URL},
    {"type": "image", "source": {"type": "url", "url": URL}},
    {"image": URL},
    {"type": "text", "text": "x", "image": URL},
    {"type": "video", "video": "v.mp4"},
    {"type": "video_url", "video_url": {"url": "v.mp4"}},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "audio", "audio": "a.wav"},
    {"type": "file", "file": {"file_id": "x"}},
    {"type": "image"},
]


@pytest.mark.parametrize("part", MEDIA)
def test_media_are_refused_where_no_processor_reads_them(part, tmp_path):
    tokenizer = tokenizers("qwen2_5_vl", tmp_path)[0]
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]
    path = write(tmp_path / "x.jsonl", {"prompt": messages})
    with pytest.raises(ValueError, match=r"x\.jsonl line 1: column 'prompt' holds a part .* are not available"):
        dataset(path, tokenizer, apply_chat_template=True)
    with pytest.raises(ValueError, match=r"the conversation holds a part of type .* are not available"):
        MultiTurnLossMaskGenerator(tokenizer).get_loss_mask([*messages, {"role": "assistant", "content": "a"}])


@pytest.mark.parametrize("column", ["images", "image"])
def test_placeholders_of_a_column_that_is_not_read_are_refused(column, tmp_path, caplog):
    tokenizer = tokenizers("qwen3", tmp_path)[0]
    rows = [{"prompt": "<image> in a text about HTML", column: []}, {"prompt": "what is <image>?", column: ["a.png"]}]
    with pytest.raises(ValueError, match=rf"line 2: the prompt has <image> for what is in column '{column}'"):
        dataset(write(tmp_path / "x.jsonl", *rows), tokenizer, apply_chat_template=True)
    assert len(dataset(write(tmp_path / "x.jsonl", rows[0]), tokenizer, apply_chat_template=True)) == 1
    for other in ("ubuntu:24.04", 5, True, None, {}):  # an image of something else
        path = write(tmp_path / "x.jsonl", {"prompt": "write <image> in HTML", column: other})
        assert len(dataset(path, tokenizer, apply_chat_template=True)) == 1
    assert caplog.text == ""
    dataset(write(tmp_path / "x.jsonl", {"prompt": "no word", column: ["a.png"]}), tokenizer, apply_chat_template=True)
    assert f"column '{column}' holds media, of which the model sees nothing" in caplog.text


@pytest.mark.parametrize("part", MEDIA[:7])
def test_media_have_one_form_for_a_processor(part):
    [message] = media_messages([{"role": "user", "content": [part]}], "row")
    assert message["content"] == [{"type": "image", "image": URL}]


def test_parts_without_an_item_take_it_from_their_column():
    row = {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}], "pics": ["a"]}
    [message] = build_messages(row, "prompt", True, {"image": "pics"})
    assert message["content"][0] == {"type": "image", "image": "a"}
    with pytest.raises(ValueError, match="a part of type 'image' holds nothing that can be read"):
        build_messages({**row, "pics": []}, "prompt", True, {"image": "pics"})
    with pytest.raises(ValueError, match="'audio' is of a kind that is not available"):
        media_messages([{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}], "row")


def test_images_of_every_form_are_opened(tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.setitem(__import__("sys").modules, "qwen_vl_utils", None)
    buffer = io.BytesIO()
    Image.new("RGB", (2, 1), (1, 2, 3)).save(buffer, format="PNG")
    (tmp_path / "a.png").write_bytes(buffer.getvalue())
    path, encoded = str(tmp_path / "a.png"), base64.b64encode(buffer.getvalue()).decode()
    data_url = f"data:image/png;base64,{encoded}"
    parts = [
        {"type": "image_url", "image_url": {"url": data_url, "detail": "low"}},
        {"type": "input_image", "image_url": path},
        {"type": "image", "path": path},
        {"type": "image", "base64": encoded},
        {"type": "image", "image": {"path": path}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}},
    ]
    images = process_vision_info([{"role": "user", "content": parts}], None)["images"]
    assert [image.getpixel((1, 0)) for image in images] == [(1, 2, 3)] * len(parts)
    asked = []
    monkeypatch.setattr(images_module, "fetch", lambda url, *limits: asked.append(url) or buffer.getvalue())
    [image] = process_vision_info([{"role": "user", "content": [MEDIA[0]]}], None)["images"]
    assert (image.getpixel((1, 0)), asked) == ((1, 2, 3), [URL])


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ("", "holds '', which is no JSON"),
        ("[not json", "holds '[not json', which is no JSON"),
        ("[" * 100_000, "which is no JSON"),
        ("null", "must hold a list of tools (or a JSON text of one), got NoneType"),
        ({"name": "f"}, "must hold a list of tools (or a JSON text of one), got dict"),
        (["f"], "holds 'f', which is no JSON"),
        ([3], "tool 0 must be an object, got 3"),
    ],
)
def test_tools_that_are_none_are_named_by_their_row(tools, said, tmp_path):
    path = write(tmp_path / "x.jsonl", {"prompt": "a", "tools": None}, {"prompt": "hi", "tools": tools})
    with pytest.raises(ValueError, match=r"x\.jsonl line 2: column 'tools'") as raised:
        dataset(path, tool_key="tools")
    assert said in str(raised.value)


def test_tools_may_be_json_text_as_a_whole_or_one_by_one(tmp_path):
    tool = {"name": "f", "default": None}
    rows = [{"prompt": "a", "tools": form} for form in ([tool], json.dumps([tool]), [json.dumps(tool)])]
    data = dataset(write(tmp_path / "x.jsonl", *rows), tool_key="tools")
    assert [sample.metadata["tools"] for sample in data.samples] == [[tool]] * 3


@pytest.mark.parametrize("far", [1, 200])
def test_prompts_of_two_kinds_are_named_by_both_rows(far, tmp_path):
    messages = [{"role": "user", "content": "y"}]
    path = write(tmp_path / "x.jsonl", *[{"prompt": "x"}] * far, {"prompt": messages})
    with pytest.raises(ValueError, match=rf"line {far + 1}: column 'prompt' holds a list, and text in .* line 1:"):
        dataset(path, max_length=5)


def test_messages_are_left_as_they_are():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "tool", "content": {"k": 1}}]
    kept = json.dumps(messages)
    assert text_messages(messages, "row")[0]["content"] == "a"
    assert json.dumps(messages) == kept
