"""Episodes with images: requests, tokens, masks and the processor's tensors; the tool; the data."""

from __future__ import annotations

import base64
import io
import json
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image

from examples.geo3k_vlm.prepare import INSTRUCTION, prepare
from examples.geo3k_vlm_multi_turn import rollout
from examples.geo3k_vlm_multi_turn.geo3k import TOOL, Geo3k
from examples.geo3k_vlm_multi_turn.make_data import QUESTION, make_data
from examples.geo3k_vlm_multi_turn.squares import picture, reward
from slime.rollout import sglang_rollout
from slime.utils.async_utils import run
from slime.utils.data import Dataset
from slime.utils.image_tokens import FORBIDDEN
from slime.utils.types import Sample
from tests.support.agents import BEGIN, END
from tests.support.episodes import player, trained
from tests.support.vision import PAD, Processor, VisionTokenizer

SQUARES = {"max_turns": 2, "rollout_interaction_env_path": "examples.geo3k_vlm_multi_turn.squares"}
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


def asked(seed: int = 3) -> Sample:
    image, count = picture(seed)
    content = [{"type": "image", "image": image}, {"type": "text", "text": "How many red squares?"}]
    prompt = VisionTokenizer().apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return Sample(index=0, group_index=0, prompt=prompt, label=str(count), multimodal_inputs={"images": [image]})


def test_an_observation_with_an_image(make_player):
    sample = asked()
    given = sample.multimodal_inputs
    with make_player(SQUARES) as play:
        found = play(lambda turns: "look left" if len(turns) < 4 else "1", sample)
    first, second = REQUESTS
    start = f"{BEGIN}user\n<{PAD}>How many red squares?{END}\n{BEGIN}assistant\n"
    shown = f"{END}\n{BEGIN}user\n<{PAD}>How many red squares in all?{END}\n{BEGIN}assistant\n"
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
    assert images[1].size == images[0].size
    png = base64.b64decode(second["image_data"][1].partition("base64,")[2])
    assert Image.open(io.BytesIO(png)).tobytes() == images[1].tobytes()
    assert found.status == Sample.Status.COMPLETED
    assert found.metadata["round_number"] == 2


def test_episodes_that_are_not_done(make_player):
    with make_player(SQUARES) as play:
        looks = play(lambda turns: "look right", asked())
        assert looks.status == Sample.Status.TRUNCATED
        assert trained(looks) == f"look right{END}" * 2
        assert all(request["sampling_params"]["logit_bias"] == {str(ord(PAD)): FORBIDDEN} for request in REQUESTS)
        with pytest.raises(RuntimeError, match=f"generated token {ord(PAD)}, a placeholder of images"):
            play(lambda turns: f"look left {PAD}", asked())  # an engine that lets the model draw one
    with make_player(SQUARES, rollout_max_response_len=30) as play:
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
    with mock.patch.object(sglang_rollout, "load_processor", return_value=None), make_player(SQUARES) as play:
        with pytest.raises(ValueError, match="has no processor of images, or --multimodal-keys is not given"):
            play(lambda turns: "1", asked())


@pytest.mark.parametrize(("said", "expected"), [("2", 1.0), ("first 3, no, 2", 1.0), ("two", 0.0), ("3", 0.0)])
def test_the_reward_of_squares(said, expected):
    assert run(reward(None, Sample(response=said, label="2"))) == expected


def test_pictures_of_squares(tmp_path):
    make_data(tmp_path, seed=1)
    rows = {f.stem: [json.loads(line) for line in f.read_text().splitlines()] for f in tmp_path.glob("*.jsonl")}
    assert len(rows["squares"]) == 128
    assert {row["label"] for row in rows["train"]} == {"0", "1", "2", "3", "4"}
    keys = {"prompt_key": "messages", "label_key": "label", "multimodal_keys": {"image": "images"}}
    data = Dataset(
        str(tmp_path / "squares.jsonl"), VisionTokenizer(), Processor(), None, apply_chat_template=True, **keys
    )
    assert data[5].prompt.startswith(f"{BEGIN}user\n<{PAD}>{QUESTION.removeprefix('<image>')}{END}")
    assert data[5].multimodal_inputs["images"][0].tobytes() == picture(5)[0].tobytes()


def test_geometry3k_is_prepared(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    image = picture(1)[0]
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    rows = [{"problem": "<image>Find x.", "answer": "7", "images": [{"bytes": buffer.getvalue(), "path": None}]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "raw.parquet")
    assert prepare(tmp_path / "raw.parquet", tmp_path / "out" / "train.parquet", multi_turn=True) == 1
    keys = {"prompt_key": "problem", "label_key": "answer", "tool_key": "tools", "multimodal_keys": {"image": "images"}}
    data = Dataset(
        str(tmp_path / "out" / "train.parquet"), VisionTokenizer(), Processor(), None, apply_chat_template=True, **keys
    )
    sample = data[0]
    assert sample.prompt == f"{BEGIN}user\n<{PAD}>Find x.{INSTRUCTION}{END}\n{BEGIN}assistant\n"
    assert sample.multimodal_inputs["images"][0].tobytes() == image.tobytes()
    assert (sample.label, sample.metadata["tools"]) == ("7", [TOOL])
    rows[0]["images"] = []
    parquet.write_table(pyarrow.Table.from_pylist([rows[0]]), tmp_path / "raw.parquet")
    with pytest.raises(ValueError, match=r"names 1 images with <image>, but has 0"):
        prepare(tmp_path / "raw.parquet", tmp_path / "train.parquet", multi_turn=False)
