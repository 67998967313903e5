"""Images in agents' requests: what engines get, what samples keep, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from PIL import Image

from slime.agent import images as agent_images
from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from slime.agent.serve import Gateway
from slime.rollout.requests.images import complete
from slime.utils.image_tokens import FORBIDDEN
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.rollout_buffer_example import _trajectory
from slime_plugins.rollout_buffer.trajectory_checks import ItemError, check_item
from tests.support.agents import BEGIN, END, ToolTokenizer, scripted_engine, served, trained_text
from tests.support.vision import PAD, PATCH, Processor, written

BASE = Sample(index=1, group_index=0, prompt="p", label="l")


class SeeingTokenizer(ToolTokenizer):
    def convert_tokens_to_ids(self, token: str) -> int:
        return ord(token)

    def __call__(self, texts: list[str], add_special_tokens: bool = True) -> dict[str, Any]:
        return {"input_ids": [self.encode(text) for text in texts]}

    def apply_chat_template(self, messages: list[dict], **options: Any) -> Any:
        return super().apply_chat_template([{**m, "content": written(m["content"])} for m in messages], **options)


class BlindTokenizer(SeeingTokenizer):
    """Its template leaves images out."""

    def apply_chat_template(self, messages: list[dict], **options: Any) -> Any:
        return super().apply_chat_template([{**m, "content": "?"} for m in messages], **options)


@pytest.fixture
def gateway() -> Iterator[Any]:
    open_contexts = []

    def enter(context: Any) -> Any:
        open_contexts.append(context)
        return context.__enter__()

    def start(kind: Any, *lines: str, tokenizer: Any = None, limit: int = 0, **options: Any) -> SimpleNamespace:
        cluster = enter(scripted_engine(*lines))
        options = {"processor": Processor(), **options}
        adapter = kind(tokenizer=tokenizer or SeeingTokenizer(), sglang_url=cluster.router.url, **options)
        handle = enter(served(adapter))
        adapter.open_session("s", sampling_defaults={"max_new_tokens": 100}, max_context_tokens=limit)
        client = enter(httpx.Client(base_url=f"http://127.0.0.1:{handle.port}", headers={"Authorization": "Bearer s"}))
        engine = cluster.engines[0]
        return SimpleNamespace(adapter=adapter, client=client, engine=engine, script=engine.reply)

    yield start
    for context in reversed(open_contexts):
        context.__exit__(None, None, None)


def data(width: int, height: int, color: int) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (width * PATCH, height * PATCH), (color, color, color)).save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def openai_image(*args: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data(*args)}", "detail": "low"}}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def ask(g: Any, *messages: Any) -> Any:
    return g.client.post("/v1/chat/completions", json={"model": "m", "messages": list(messages)})


def check(sample: Sample, grids: list[list[int]], colors: list[int]) -> None:
    assert sample.multimodal_train_inputs["image_grid_thw"].tolist() == grids
    assert sample.multimodal_train_inputs["pixel_values"][:, 0].tolist() == colors
    assert sample.tokens.count(ord(PAD)) == len(colors)
    assert [image.getpixel((0, 0))[0] for image in sample.multimodal_inputs["images"]] == list(dict.fromkeys(colors))
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length


async def test_two_turns_with_chat_completions(gateway):
    g = gateway(OpenAIAdapter, "a square", "a line")
    first = [user(text("what"), openai_image(2, 2, 7), text("is it?"))]
    answer = ask(g, *first).json()
    assert answer["choices"][0]["message"]["content"] == "a square"
    start = f"{BEGIN}user\nwhat<{PAD}>is it?{END}{BEGIN}assistant\n"
    assert answer["usage"]["prompt_tokens"] == len(start) + 3
    said = {"role": "assistant", "content": "a square"}
    ask(g, *first, said, user(openai_image(1, 3, 9)))
    whole = f"{start}a square{END}{BEGIN}user\n<{PAD}>{END}{BEGIN}assistant\n"
    assert g.script.prompts == [start, whole]  # one placeholder for each image
    assert [len(request["image_data"]) for request in g.engine.requests] == [1, 2]
    assert g.engine.requests[0]["image_data"][0] == g.engine.requests[1]["image_data"][0]
    assert all(r["sampling_params"]["logit_bias"] == {str(ord(PAD)): FORBIDDEN} for r in g.engine.requests)
    [sample] = await g.adapter.finish_session("s", base_sample=BASE, reward=1.0)
    assert "".join(map(chr, sample.tokens)) == f"{whole}a line{END}".replace(PAD, "", 1).replace(
        f"<{PAD}", f"<{PAD * 3}"
    ).replace("what<", f"what<{PAD * 4}")
    check(sample, [[1, 2, 2], [1, 3, 1]], [7] * 4 + [9] * 3)
    assert trained_text(sample) == [f"a square{END}", f"a line{END}"]
    assert sample.response == f"a square{END}{BEGIN}user\n<{PAD}>{END}{BEGIN}assistant\na line{END}"
    assert g.adapter.store == {}


async def test_a_tools_reply_with_anthropic(gateway):
    g = gateway(AnthropicAdapter, "hm", "done")
    source = {"type": "base64", "media_type": "image/png", "data": data(2, 1, 5)}
    first = {"role": "user", "content": [text("go"), {"type": "image", "source": source}]}
    body = {"model": "m", "max_tokens": 50, "messages": [first]}
    assert (
        g.client.post("/v1/messages", json=body).json()["usage"]["input_tokens"]
        == len(f"{BEGIN}user\ngo<{PAD}>{END}{BEGIN}assistant\n") + 1
    )
    result = {"type": "tool_result", "tool_use_id": "t", "content": [
        text("seen"), {"type": "image", "source": {**source, "data": data(1, 2, 6)}}]}  # fmt: skip
    body["messages"] += [{"role": "assistant", "content": "hm"}, {"role": "user", "content": [result]}]
    counted = g.client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    answer = g.client.post("/v1/messages", json=body).json()
    assert answer["usage"]["input_tokens"] == counted == len(g.script.prompts[1]) + 2
    assert g.script.prompts[1].endswith(f"{BEGIN}tool\nseen<{PAD}>{END}{BEGIN}assistant\n")
    [sample] = await g.adapter.finish_session("s", base_sample=BASE)
    check(sample, [[1, 1, 2], [1, 2, 1]], [5, 5, 6, 6])


async def test_the_responses_api(gateway):
    g = gateway(OpenAIAdapter, "one", "two")
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{data(2, 1, 5)}"}
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "look"}, image]}]
    answer = g.client.post("/v1/responses", json={"model": "m", "input": items}).json()
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    shown = {"type": "input_image", "image_url": f"data:image/png;base64,{data(1, 1, 6)}"}
    items += [*answer["output"], call, {"type": "function_call_output", "call_id": "c", "output": [shown]}]
    assert g.client.post("/v1/responses", json={"model": "m", "input": items}).status_code == 200
    assert g.script.prompts[1].count(PAD) == 2
    samples = await g.adapter.finish_session("s", base_sample=BASE)
    check(samples[-1], [[1, 1, 2], [1, 1, 1]], [5, 5, 6])


async def test_conversations_that_differ_in_an_image_alone(gateway):
    g = gateway(OpenAIAdapter, "a", "b")
    for color in (1, 2):
        ask(g, user(text("what?"), openai_image(1, color, color)))
    one, other = await g.adapter.finish_session("s", base_sample=BASE)
    check(one, [[1, 1, 1]], [1])
    check(other, [[1, 2, 1]], [2, 2])


async def test_samples_are_cut_by_expanded_tokens(gateway):
    prompt = f"{BEGIN}user\n<{PAD}>{END}{BEGIN}assistant\n"
    limit = len(prompt) + 3 + 8  # four tokens of the image
    g = gateway(OpenAIAdapter, "0123456789" * 3, limit=limit)
    ask(g, user(openai_image(2, 2, 7)))
    assert g.engine.requests[0]["sampling_params"]["max_new_tokens"] == 8
    [sample] = await g.adapter.finish_session("s", base_sample=BASE)
    assert (len(sample.tokens), sample.response_length, sample.status) == (limit, 8, Sample.Status.TRUNCATED)
    full = gateway(OpenAIAdapter, "x", limit=len(prompt) + 3)
    assert ask(full, user(openai_image(2, 2, 7))).json()["choices"][0]["finish_reason"] == "length"
    assert full.engine.requests == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("/etc/passwd", "files of this host are not read for others"),
        ("file:///etc/passwd", "files of this host are not read for others"),
        ("http://127.0.0.1:1/a.png", "which is no public address"),
        ("http://169.254.169.254/latest", "which is no public address"),
        ("data:image/png;base64,AAAA", "is no image that can be read"),
        ("data:image/png;base64,%%%", "is not base64"),
    ],
)
async def test_images_that_are_refused(gateway, url, message):
    g = gateway(OpenAIAdapter, "never")
    reply = ask(g, user({"type": "image_url", "image_url": {"url": url}}))
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]
    assert g.engine.requests == []
    assert await g.adapter.finish_session("s", base_sample=BASE) == []


def test_limits_of_a_request_and_of_a_session(gateway, monkeypatch):
    g = gateway(OpenAIAdapter, "never")
    monkeypatch.setattr(agent_images, "MOST_IMAGES", 2)
    assert "may have 2 images" in ask(g, user(*[openai_image(1, 1, 1)] * 3)).text
    monkeypatch.setattr(agent_images, "MOST_BYTES", 150)
    reply = ask(g, user(*(openai_image(1, 1, color) for color in (1, 2))))
    assert "images of a session may have 150 bytes" in reply.text


def test_a_template_without_images(gateway):
    g = gateway(OpenAIAdapter, "never", tokenizer=BlindTokenizer())
    reply = ask(g, user(openai_image(1, 1, 1)))
    assert (reply.status_code, g.engine.requests) == (400, [])
    assert "writes 0 places for 1 images" in reply.text


def test_a_text_with_the_placeholder_is_refused(gateway):
    """It would be the place of an image that is not there, on which a run ends."""
    g = gateway(OpenAIAdapter, "never")
    for parts in ([text(f"the token {PAD}")], [text(PAD), openai_image(1, 1, 1)]):
        reply = ask(g, user(*parts))
        assert (reply.status_code, g.engine.requests) == (400, [])
        assert f"{len(parts)} places for {len(parts) - 1} images" in reply.text


async def test_a_processor_that_takes_no_images(gateway):
    g = gateway(OpenAIAdapter, "plain", processor=SimpleNamespace(audio_token="a"))
    assert ask(g, user(text("hi"))).status_code == 200
    [sample] = await g.adapter.finish_session("s", base_sample=BASE)
    assert sample.response == f"plain{END}"


def test_requests_of_a_session_may_overlap(monkeypatch):
    held, reader = agent_images.SessionImages(), SimpleNamespace(tokenizer=SeeingTokenizer(), processor=Processor())
    monkeypatch.setattr(agent_images, "open_image", lambda source, **_: source)
    monkeypatch.setattr(agent_images, "encode_image_for_rollout_engine", lambda image: image)
    monkeypatch.setattr(agent_images, "expanded_length", lambda *_: 1)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(lambda i: held.take(reader, str(i)), range(2000)))) == 2000
    finally:
        sys.setswitchinterval(interval)


async def test_large_pngs_are_kept(gateway, monkeypatch):
    """A PNG may have more bytes than the file that it was made of."""
    g = gateway(OpenAIAdapter, "x")
    ask(g, user(openai_image(1, 1, 7)))
    monkeypatch.setattr("slime.utils.images.MAX_BYTES", 50)
    [sample] = await g.adapter.finish_session("s", base_sample=BASE)
    check(sample, [[1, 1, 1]], [7])


async def test_without_a_processor_images_are_left_out(gateway):
    g = gateway(OpenAIAdapter, "blind", processor=None)
    ask(g, user(text("a"), openai_image(1, 1, 1), text("b")))
    assert g.script.prompts == [f"{BEGIN}user\na\nb{END}{BEGIN}assistant\n"]
    assert "image_data" not in g.engine.requests[0]
    assert "logit_bias" not in g.engine.requests[0]["sampling_params"]
    [sample] = await g.adapter.finish_session("s", base_sample=BASE)
    assert sample.multimodal_inputs is None


async def test_an_engine_that_counts_otherwise_or_draws_a_placeholder(gateway, monkeypatch):
    g = gateway(OpenAIAdapter, f"x{PAD}")
    assert ask(g, user(openai_image(2, 2, 1))).status_code == 500
    monkeypatch.setattr("tests.support.standin.engine._tokens_of_image", lambda url: 9)
    g = gateway(OpenAIAdapter, "x")
    assert ask(g, user(openai_image(2, 2, 1))).status_code == 500
    assert await g.adapter.finish_session("s", base_sample=BASE) == []


async def test_text_with_a_processor_is_as_without(gateway):
    g = gateway(OpenAIAdapter, "plain")
    ask(g, {"role": "user", "content": "hi"})
    [sample] = await g.adapter.finish_session("s", base_sample=BASE)
    assert (sample.multimodal_inputs, sample.multimodal_train_inputs) == (None, None)
    assert "".join(map(chr, sample.tokens)) == f"{BEGIN}user\nhi{END}{BEGIN}assistant\nplain{END}"


def test_tensors_are_those_of_the_processor():
    held, reader = agent_images.SessionImages(), SimpleNamespace(tokenizer=SeeingTokenizer(), processor=Processor())
    source = f"data:image/png;base64,{data(2, 2, 3)}"
    digest = held.take(reader, source)
    assert held.take(reader, source) == digest == held.take(reader, f"data:image/x;base64,{data(2, 2, 3)}")
    assert held.extra([digest, digest]) == 6
    sample = Sample(multimodal_inputs={"images": [digest]})
    held.show(reader, [sample, Sample()], pixels=True)
    assert torch.equal(sample.multimodal_train_inputs["pixel_values"], torch.full((4, 3), 3.0))


async def test_a_session_of_the_gateway_command_reaches_the_run_with_its_images(monkeypatch):
    """Its record is JSON with the images; the run makes the trainer's tensors."""
    monkeypatch.setattr(Gateway, "write", lambda self, item: written_items(item))
    items: list[dict[str, Any]] = []

    async def written_items(item: dict[str, Any]) -> None:
        items.append(json.loads(json.dumps(item)))

    with scripted_engine("seen") as cluster:
        reader: dict[str, Any] = {"tokenizer": SeeingTokenizer(), "processor": Processor()}
        gateway = Gateway(sink="http://127.0.0.1:1", key="k" * 32, sglang_url=cluster.router.url, **reader)
        with served(gateway) as handle:
            url = f"http://127.0.0.1:{handle.port}"
            async with httpx.AsyncClient(base_url=url) as client:
                key = {"Authorization": f"Bearer {'k' * 32}"}
                sid = (await client.post("/sessions", json={"instance_id": "i"}, headers=key)).json()["session_id"]
                body = {"model": "m", "messages": [user(openai_image(2, 1, 8))]}
                await client.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {sid}"})
                done = await client.post(f"/sessions/{sid}/finish", json={"reward": 1}, headers=key)
    assert done.json()["samples"] == 1
    [item] = items
    check_item(item)
    assert len(item["samples"][0]["images"]) == 1
    sample = _trajectory(item, None, 0, 3)
    complete([sample], lambda: SimpleNamespace(**reader))
    check(sample, [[1, 1, 2]], [8, 8])
    for broken in (["/etc/passwd"], "data:image/png", [3]):
        item["samples"][0]["images"] = broken
        with pytest.raises(ItemError, match="images must be a list of data: URLs of images"):
            check_item(item)
