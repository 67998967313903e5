"""Episodes with images: in the prompt, in observations and in what tools answer."""

from __future__ import annotations

import base64
import io
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
from PIL import Image

from slime.rollout import sglang_rollout
from slime.rollout.environments import Environment, Step, ToolEnvironment
from slime.rollout.environments.mcp_tools import _part
from slime.rollout.environments.tools import content_of, without_images
from slime.utils.types import Sample
from tests.support.agents import BEGIN, END
from tests.support.episodes import player, trained
from tests.support.vision import PAD, PATCH, Processor, VisionTokenizer


def picture(width: int, height: int, color: int) -> Image.Image:
    return Image.new("RGB", (width * PATCH, height * PATCH), (color, color, color))


def image(*args: int) -> dict[str, Any]:
    return {"type": "image", "image": picture(*args)}


class Shows(Environment):
    """Shows a picture in the prompt, and two of other sizes after the first turn."""

    def reset(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [image(2, 2, 1), {"type": "text", "text": "go"}]}]

    def step(self, action: str) -> Step:
        return Step(action, done=action == "end", reward=1.0)

    def format_observation(self, observation: str) -> dict[str, Any]:
        parts = [image(1, 1, 2), {"type": "text", "text": observation}, image(3, 1, 3)]
        return {"role": "user", "content": parts if observation == "more" else observation}


class Plain(Shows):
    """Has the prompt of its row."""

    def reset(self) -> None:  # type: ignore[override]
        return None


def draw(side: int) -> Any:
    """Draw a square."""
    return picture(side, side, 10 * side)


def both() -> Any:
    """Return a text and a picture."""
    return ["seen:", picture(2, 1, 50), {"type": "text", "text": "."}]


class Draws(ToolEnvironment):
    functions: ClassVar[tuple[Any, ...]] = (draw, both)

    def answer(self, text: str) -> float:
        return float(text == "done")


class Broken(Shows):
    def format_observation(self, observation: str) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "image", "image": "data:image/png;base64,AAAA"}]}


@pytest.fixture
def make_player():
    requests: list[dict[str, Any]] = []
    post = sglang_rollout.post

    async def recorded(url: str, payload: dict[str, Any], headers: Any = None) -> Any:
        requests.append(payload)
        return await post(url, payload, headers=headers)

    def make(kind: type[Environment], **flags: Any) -> Any:
        path = f"{__name__}.{kind.__name__}"
        flags = {"multimodal_keys": {"image": "images"}, **flags}
        return player(environment_path=[path], **flags)

    with (
        mock.patch.object(sglang_rollout, "load_processor", return_value=Processor()),
        mock.patch("tests.support.episodes.ToolTokenizer", VisionTokenizer),
        mock.patch.object(sglang_rollout, "post", recorded),
    ):
        yield SimpleNamespace(make=make, requests=requests)


def check(sample: Sample, grids: list[tuple[int, int]], colors: list[int]) -> None:
    tensors = sample.multimodal_train_inputs
    assert tensors["image_grid_thw"].tolist() == [[1, *grid] for grid in grids]
    assert tensors["pixel_values"][:, 0].tolist() == colors
    assert sample.tokens.count(ord(PAD)) == len(colors)
    assert len(sample.multimodal_inputs["images"]) == len(grids)
    assert PAD not in trained(sample)


def test_images_of_prompt_and_observation(make_player):
    with make_player.make(Shows) as play:
        found = play(lambda turns: {2: "more", 4: "end"}[len(turns)], Sample(index=0, group_index=0))
    start = f"{BEGIN}user\n<{PAD}>go{END}\n{BEGIN}assistant\n"
    seen = f"{END}\n{BEGIN}user\n<{PAD}>more<{PAD}>{END}\n{BEGIN}assistant\n"
    assert ["".join(map(chr, r["input_ids"])) for r in make_player.requests] == [start, f"{start}more{seen}"]
    assert [len(request["image_data"]) for request in make_player.requests] == [1, 3]
    check(found, [(2, 2), (1, 1), (1, 3)], [1] * 4 + [2] + [3] * 3)
    assert found.response == f"more{seen}end{END}"
    assert trained(found) == f"more{END}end{END}"
    assert found.environment_episode["rewritten_by_template"] is False
    assert (found.reward, found.status) == (2.0, Sample.Status.COMPLETED)


def test_images_of_the_data_set(make_player):
    prompt = [{"role": "user", "content": [image(2, 1, 4), {"type": "text", "text": "?"}]}]
    inputs = {"images": [prompt[0]["content"][0]["image"]]}
    rendered = VisionTokenizer().apply_chat_template(prompt, add_generation_prompt=True)
    with make_player.make(Plain) as play:
        for given in (prompt, rendered):
            sample = Sample(index=0, group_index=0, prompt=given, multimodal_inputs=inputs)
            found = play(lambda turns: "end", sample)
            check(found, [(1, 2)], [4, 4])
            assert found.multimodal_inputs["images"][0] is inputs["images"][0]


def test_tools_answer_with_images(make_player):
    calls = '<tool_call>{"name": "draw", "arguments": {"side": 2}}</tool_call>'
    calls += '<tool_call>{"name": "both", "arguments": {}}</tool_call>'
    sample = Sample(index=0, group_index=0, prompt="p", label="x")
    with make_player.make(Draws) as play:
        found = play(lambda turns: "done" if turns else calls, sample)
    assert f"{BEGIN}tool\n<{PAD}>{END}\n{BEGIN}tool\nseen:<{PAD}>.{END}" in found.response
    check(found, [(2, 2), (1, 2)], [20] * 4 + [50] * 2)
    assert found.reward == 1.0
    assert sample.multimodal_inputs["images"] == found.multimodal_inputs["images"]


def test_a_broken_image_is_a_failure_of_the_environment(make_player):
    with make_player.make(Broken) as play:
        found = play(lambda turns: "more", Sample(index=0, group_index=0))
    assert found.status == Sample.Status.ABORTED
    assert found.metadata["abort_reason"].endswith("format_observation.ImageError")
    assert not found.multimodal_inputs


@pytest.mark.parametrize("observation", [f"the token {PAD}", {"role": "user", "content": f"the token {PAD}"}])
def test_an_observation_with_the_text_of_a_placeholder_fails_the_episode(make_player, observation, monkeypatch):
    monkeypatch.setattr(Shows, "format_observation", lambda *_: observation)
    with make_player.make(Shows) as play:
        found = play(lambda turns: "more", Sample(index=0, group_index=0))
    assert found.status == Sample.Status.ABORTED
    assert found.metadata["abort_reason"].endswith("format_observation.PlacesError")
    assert "has 1 times" in found.metadata["abort_error"]


def test_without_a_processor(make_player):
    with make_player.make(Shows, multimodal_keys=None) as play:
        with pytest.raises(ValueError, match="there is an image in a message, and no processor is loaded"):
            play(lambda turns: "more", Sample(index=0, group_index=0))
    calls = '<tool_call>{"name": "both", "arguments": {}}</tool_call>'
    with make_player.make(Draws, multimodal_keys=None) as play:
        sample = Sample(index=0, group_index=0, prompt="p", label="x")
        found = play(lambda turns: "done" if turns else calls, sample)
    assert f"{BEGIN}tool\nseen:\n[image]\n.{END}" in found.response


def test_what_tools_answer_as_content():
    one = picture(1, 1, 1)
    assert content_of("text") == "text"
    assert content_of({"a": [1]}) == '{"a": [1]}'
    assert content_of([1, "a"]) == '[1, "a"]'
    assert content_of(one) == [{"type": "image", "image": one}]
    secret = {"type": "image", "image": "/etc/passwd"}  # of a page that a tool read, say
    assert isinstance(content_of(secret), str)
    assert [part["type"] for part in content_of([one, secret])] == ["image", "text"]
    mixed = content_of([one, {"b": 2}, "c"])
    assert [part["type"] for part in mixed] == ["image", "text", "text"]
    assert without_images(mixed) == '[image]\n{"b": 2}\nc'


def test_images_of_mcp_servers():
    buffer = io.BytesIO()
    picture(1, 1, 1).save(buffer, format="PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    part = _part(SimpleNamespace(type="image", data=data, mimeType="image/png"))
    assert part == {"type": "image", "image": f"data:image/png;base64,{data}"}
    assert _part(SimpleNamespace(type="text", text="t")) == {"type": "text", "text": "t"}
    assert _part(SimpleNamespace(type="audio")) == {"type": "text", "text": "[audio]"}
