"""Episodes with images: requests, tokens, masks and the processor's tensors; the tool; the data."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image, ImageOps

from examples.geo3k_vlm.drawings import Drawing, drawings, picture
from examples.geo3k_vlm.make_data import SLIPS, make_data
from examples.geo3k_vlm.prepare import INSTRUCTION, prepare
from examples.geo3k_vlm_multi_turn import rollout
from examples.geo3k_vlm_multi_turn.geo3k import TOOL, Geo3k
from examples.geo3k_vlm_multi_turn.make_data import make_data as make_pairs
from examples.geo3k_vlm_multi_turn.pairs import look
from slime.rollout import sglang_rollout
from slime.rollout.rm_hub.math_utils import grade_answer_verl
from slime.utils.data import Dataset
from slime.utils.image_tokens import FORBIDDEN
from slime.utils.types import Sample
from tests.support.agents import BEGIN, END
from tests.support.episodes import player, trained
from tests.support.vision import PAD, Processor, VisionTokenizer

PAIRS = {"max_turns": 2, "rollout_interaction_env_path": "examples.geo3k_vlm_multi_turn.pairs"}
LEFT, RIGHT = Drawing(3, 1, 2, 5), Drawing(2, 4, 0, 1)
GEO3K = {"max_turns": 3, "rollout_interaction_env_path": "examples.geo3k_vlm_multi_turn.geo3k"}
REQUESTS: list[dict[str, Any]] = []


@pytest.fixture
def make_player():
    """Return what plays episodes with images; the bodies of requests are in ``REQUESTS``."""
    REQUESTS.clear()
    post = sglang_rollout.post

    async def recorded(url: str, payload: dict[str, Any], headers: Any = None) -> Any:
        REQUESTS.append(payload)
        return await post(url, payload, headers=headers)

    def make(custom: dict[str, Any], **flags: Any) -> Any:
        return player(rollout.generate, custom, multimodal_keys={"image": "images"}, **flags)

    with (
        mock.patch.object(sglang_rollout, "load_processor", return_value=Processor()),
        mock.patch("tests.support.episodes.ToolTokenizer", VisionTokenizer),
        mock.patch.object(sglang_rollout, "post", recorded),
    ):
        yield make


def asked() -> Sample:
    image = picture(LEFT, RIGHT)
    content = [{"type": "image", "image": image}, {"type": "text", "text": "Sides, left?"}]
    prompt = VisionTokenizer().apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return Sample(index=0, group_index=0, prompt=prompt, label=LEFT.sides, multimodal_inputs={"images": [image]})


def test_an_observation_with_an_image(make_player):
    sample = asked()
    given = sample.multimodal_inputs
    with make_player(PAIRS) as play:
        found = play(lambda turns: "look left" if len(turns) < 4 else "1", sample)
    first, second = REQUESTS
    start = f"{BEGIN}user\n<{PAD}>Sides, left?{END}\n{BEGIN}assistant\n"
    shown = f"{END}\n{BEGIN}user\n<{PAD}>{END}\n{BEGIN}assistant\n"
    # one pad for each image in requests, as many as its patches in the sample
    assert "".join(map(chr, first["input_ids"])) == start
    assert "".join(map(chr, second["input_ids"])) == f"{start}look left{shown}"
    assert [len(request["image_data"]) for request in REQUESTS] == [1, 2]
    assert first["image_data"][0] == second["image_data"][0]
    whole = "".join(map(chr, found.tokens))
    assert whole == (start + "look left" + shown).replace(PAD, PAD * 4) + f"1{END}"
    assert trained(found) == f"look left{END}1{END}"
    assert found.response == f"look left{shown}1{END}"
    assert len(found.loss_mask) == len(found.rollout_log_probs) == found.response_length
    # all images, and the processor's tensors of all of them
    images = found.multimodal_inputs["images"]
    assert len(images) == 2
    assert len(given["images"]) == 1  # what the group shares is left alone
    expected = Processor()(text=PAD * 2, images=images, images_kwargs={"return_tensors": "pt"})
    assert torch.equal(found.multimodal_train_inputs["pixel_values"], expected["pixel_values"])
    assert found.multimodal_train_inputs["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 2]]
    assert images[1].tobytes() == picture(LEFT, cell=4).tobytes()
    png = base64.b64decode(second["image_data"][1].partition("base64,")[2])
    assert Image.open(io.BytesIO(png)).tobytes() == images[1].tobytes()
    assert found.status == Sample.Status.COMPLETED
    assert found.metadata["round_number"] == 2


def test_episodes_that_are_not_done(make_player):
    with make_player(PAIRS) as play:
        looks = play(lambda turns: "look right", asked())
        assert looks.status == Sample.Status.TRUNCATED
        assert trained(looks) == f"look right{END}" * 2
        assert all(request["sampling_params"]["logit_bias"] == {str(ord(PAD)): FORBIDDEN} for request in REQUESTS)
        with pytest.raises(RuntimeError, match=f"generated token {ord(PAD)}, a placeholder of images"):
            play(lambda turns: f"look left {PAD}", asked())  # an engine that lets the model draw one
    with make_player(PAIRS, rollout_max_response_len=30) as play:
        short = play(lambda turns: "look left", asked())
        assert short.status == Sample.Status.TRUNCATED
        assert trained(short) == f"look left{END}"
        assert len(short.multimodal_inputs["images"]) == len(short.multimodal_train_inputs["image_grid_thw"]) == 1


def test_a_tool_without_images(make_player):
    call = '<tool_call>{{"name": "calc_score", "arguments": {{"answer": "{}"}}}}</tool_call>'.format
    said = iter([call("5"), call(r"\\frac{1}{2}"), r"\boxed{1/2}"])
    sample = asked()
    sample.label = "0.5"
    with make_player(GEO3K) as play:
        found = play(lambda turns: next(said), sample)
    assert found.status == Sample.Status.COMPLETED
    assert f"{BEGIN}tool\nThat is wrong: look for the mistake.{END}" in found.response
    assert f"{BEGIN}tool\nThat is right: give it as the final answer.{END}" in found.response
    assert [len(request["image_data"]) for request in REQUESTS] == [1, 1, 1]
    assert found.multimodal_train_inputs["image_grid_thw"].tolist() == [[1, 2, 2]]


def test_calls_that_cannot_be_read():
    env = Geo3k(Sample(label="1"))
    assert env.step("<tool_call>{</tool_call>")[0].startswith("error: a tool call must be JSON")
    observation, done, _ = env.step('<tool_call>{"name": "other", "arguments": {}}</tool_call>')
    assert (observation, done) == ('error: expected {"name": "calc_score", "arguments": {"answer": "..."}}', False)
    assert env.step("so 1")[1] is True


def test_a_model_without_a_processor_is_refused(make_player):
    with mock.patch.object(sglang_rollout, "load_processor", return_value=None), make_player(PAIRS) as play:
        with pytest.raises(ValueError, match="has no processor of images, or --multimodal-keys is not given"):
            play(lambda turns: "1", asked())


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def sides_of(image: Image.Image) -> str:
    """Read the only rectangle of a drawing of 32 by 32 pixels."""
    left, top, right, bottom = ImageOps.invert(image.convert("L")).getbbox()
    assert image.crop((left, top, right, bottom)).getcolors() == [((right - left) * (bottom - top), (0, 0, 0))]
    return f"{(right - left) // 6}{(bottom - top) // 6}"


def image_in(data: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(data.partition("base64,")[2])))


def test_drawings_and_their_conversations(tmp_path):
    make_data(tmp_path, seed=1, demonstrations=1000)
    data = {name: rows(tmp_path, name) for name in ("sft", "train", "drawings", "exchanged")}
    kept = {image for row in data["drawings"] for image in row["images"]}
    assert len(kept) == 128
    assert not kept & {image for name in ("sft", "train") for row in data[name] for image in row["images"]}
    for row in data["train"] + data["drawings"]:
        assert sides_of(image_in(row["images"][0])) == row["label"]
    right = [f"\\boxed{{{sides_of(image_in(row['images'][0]))}}}" for row in data["sft"]]
    said = [row["messages"][-1]["content"] for row in data["sft"]]
    # four standard deviations of a thousand draws
    assert abs(sum(a != b for a, b in zip(right, said, strict=True)) / 1000 - SLIPS) < 0.064
    assert all(len(a) == len(b) for a, b in zip(right, said, strict=True))
    assert [row["label"] for row in data["exchanged"]] == [row["label"] for row in data["drawings"]]
    assert sorted(row["images"] for row in data["exchanged"]) == sorted(row["images"] for row in data["drawings"])
    by_chance = sum(sides_of(image_in(row["images"][0])) == row["label"] for row in data["exchanged"])
    assert by_chance / 128 <= 1 / 16 + 4 * 0.0214  # four standard deviations


def test_no_other_answer_counts_as_right():
    labels = {one.sides for one in drawings()[1]}
    assert len(labels) == 16
    for label in labels:
        assert [said for said in labels if grade_answer_verl(f"\\boxed{{{said}}}", label)] == [label]


def test_pairs_and_their_conversations(tmp_path):
    make_pairs(tmp_path, seed=1, demonstrations=200)
    looked = 0
    for row in rows(tmp_path, "sft"):
        question, first, *others = row["messages"]
        side = question["content"].removeprefix("<image>Sides, ").removesuffix("?")
        if others:
            looked += 1
            assert first["content"] == f"look {side}"
            assert others[0] == {"role": "user", "content": "<image>"}
            assert others[1]["content"] == f"\\boxed{{{sides_of(image_in(row['images'][1]))}}}"
            both, one = (image_in(image) for image in row["images"])
            half = both.crop((0, 0, 16, 16) if side == "left" else (16, 0, 32, 16))
            assert half.resize((32, 32), Image.Resampling.NEAREST).tobytes() == one.tobytes()
    assert 70 <= looked <= 130  # four standard deviations
    keys = {"prompt_key": "messages", "label_key": "label", "multimodal_keys": {"image": "images"}}
    data = Dataset(
        str(tmp_path / "pairs.jsonl"), VisionTokenizer(), Processor(), None, apply_chat_template=True, **keys
    )
    assert len(data) == 128
    side = data[5].prompt.partition("Sides, ")[2].partition("?")[0]
    assert data[5].prompt.startswith(f"{BEGIN}user\n<{PAD}>Sides, {side}?{END}")
    shown = look(data[5].multimodal_inputs["images"][0], side)
    assert sides_of(shown) == data[5].label


def test_geometry3k_is_prepared(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    image = picture(LEFT)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    raw = [{"problem": "<image>Find x.", "answer": "7", "images": [{"bytes": buffer.getvalue(), "path": None}]}]
    parquet.write_table(pyarrow.Table.from_pylist(raw), tmp_path / "raw.parquet")
    assert prepare(tmp_path / "raw.parquet", tmp_path / "out" / "train.parquet", multi_turn=True) == 1
    keys = {"prompt_key": "problem", "label_key": "answer", "tool_key": "tools", "multimodal_keys": {"image": "images"}}
    data = Dataset(
        str(tmp_path / "out" / "train.parquet"), VisionTokenizer(), Processor(), None, apply_chat_template=True, **keys
    )
    sample = data[0]
    assert sample.prompt == f"{BEGIN}user\n<{PAD}>Find x.{INSTRUCTION}{END}\n{BEGIN}assistant\n"
    assert sample.multimodal_inputs["images"][0].tobytes() == image.tobytes()
    assert (sample.label, sample.metadata["tools"]) == ("7", [TOOL])
    raw[0]["images"] = []
    parquet.write_table(pyarrow.Table.from_pylist(raw), tmp_path / "raw.parquet")
    with pytest.raises(ValueError, match=r"names 1 images with <image>, but has 0"):
        prepare(tmp_path / "raw.parquet", tmp_path / "train.parquet", multi_turn=False)
