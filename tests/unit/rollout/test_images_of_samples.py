"""Images of samples: ids of requests, the engine's length of a prompt, later turns, and what state files keep."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from slime.rollout.debug_data import load_rollout, save_rollout
from slime.rollout.durable.state_codec import decode_group, encode_group
from slime.rollout.groups import without_response
from slime.rollout.requests.generate_request import append_output, generate_payload, prompt_token_ids
from slime.rollout.requests.images import add_images, complete, prepare
from slime.utils import image_tokens, images
from slime.utils.image_tokens import FORBIDDEN, PlacesError, WithImages, collapsed, expanded, joined
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args
from tests.support.vision import PAD, PATCH, Processor, VisionTokenizer

PAD_ID = ord(PAD)


def picture(width: int, height: int, color: int = 7) -> Image.Image:
    return Image.new("RGB", (width * PATCH, height * PATCH), (color, color, color))


@pytest.fixture
def state() -> SimpleNamespace:
    return SimpleNamespace(tokenizer=VisionTokenizer(), processor=Processor(), aborted=False)


def asked(state: Any, text: str, *images: Image.Image) -> Sample:
    sample = Sample(index=4, prompt=text, multimodal_inputs={"images": list(images)} if images else None)
    sample.tokens = prompt_token_ids(state, sample)
    return sample


def request(state: Any, sample: Sample, **params: Any) -> dict[str, Any]:
    found = generate_payload(rollout_args(), sample, {"max_new_tokens": 99, **params}, False, state)
    assert found is not None
    return found


def reply(count: int, *tokens: int) -> dict[str, Any]:
    meta = {"prompt_tokens": count, "output_token_logprobs": [[-1.0, t, None] for t in tokens],
            "finish_reason": {"type": "stop"}}  # fmt: skip
    return {"text": "".join(map(chr, tokens)), "output_ids": list(tokens), "meta_info": meta}


def test_requests_have_one_placeholder_for_each_image(state, monkeypatch):
    sample = asked(state, f"a<{PAD}>b<{PAD}>c", picture(2, 1), picture(3, 2))
    assert "".join(map(chr, sample.tokens)) == f"a<{PAD * 2}>b<{PAD * 6}>c"
    assert sample.multimodal_train_inputs["image_grid_thw"].tolist() == [[1, 1, 2], [1, 2, 3]]
    assert "image_data" not in request(state, asked(state, "none"))
    first = request(state, sample, logit_bias={"65": 2.0})
    assert "".join(map(chr, first["input_ids"])) == f"a<{PAD}>b<{PAD}>c"
    assert len(first["image_data"]) == 2
    assert "text" not in first
    assert first["sampling_params"]["logit_bias"] == {"65": 2.0, str(PAD_ID): FORBIDDEN}
    # what was generated is sent as it is, also where the tokenizer would make other ids of its text
    append_output(rollout_args(), sample, reply(len(sample.tokens), 300, 301))
    monkeypatch.setattr(VisionTokenizer, "encode", None)
    again = request(state, sample)
    assert again["input_ids"] == [*first["input_ids"], 300, 301]
    assert again["image_data"] == first["image_data"]


def test_the_engines_length_of_the_prompt(state):
    sample = asked(state, f"<{PAD}>", picture(2, 2))
    with pytest.raises(RuntimeError, match=r"index=4: the engine made 7 tokens of the prompt, which has 6 here"):
        append_output(rollout_args(), sample, reply(7, 65))
    assert sample.response_length == 0
    append_output(rollout_args(), sample, reply(6, 65))
    append_output(rollout_args(), asked(state, "text"), reply(99, 65))  # of text it is the tokens that were sent


def test_tokens_and_images_that_do_not_belong_together(state):
    sample = asked(state, f"<{PAD}>", picture(2, 2))
    sample.tokens += [65, PAD_ID]
    with pytest.raises(ValueError, match=r"index=4 has 1 images and 2 places for images"):
        request(state, sample)
    sample = asked(state, f"<{PAD}>", picture(2, 2))
    with pytest.raises(ValueError, match="no processor is loaded for them: give --multimodal-keys"):
        request(None, sample)


@pytest.mark.parametrize(
    ("tokens", "images", "expected"),
    [
        ([1, 2], 0, [1, 2]), ([9, 9, 9], 1, [9]), ([9, 1, 9, 9], 2, [9, 1, 9]), ([1, 9, 9, 2, 9], 2, [1, 9, 2, 9]),
        ([], 0, []),
    ],
)  # fmt: skip
def test_collapsing(tokens, images, expected):
    assert collapsed(tokens, 9, images, "it") == expected


def test_images_of_later_turns(state):
    sample = asked(state, f"<{PAD}>", picture(1, 1, 1))
    of_group = dict(sample.multimodal_inputs), dict(sample.multimodal_train_inputs)
    sample.append_response_tokens(tokens=[65], log_probs=[-1.0], text="A")
    tokenizer = WithImages(state)
    tokenizer.show([picture(2, 1, 2)])
    ids = tokenizer.encode(f"look <{PAD}>")
    assert tokenizer.decode(ids) == f"look <{PAD}>"
    sample.append_response_tokens(tokens=ids, text="", trainable=False)
    add_images(sample, [picture(2, 1, 2)], tokenizer.inputs)
    assert sample.multimodal_train_inputs["pixel_values"][:, 0].tolist() == [1, 2, 2]
    assert request(state, sample)["input_ids"] == [ord(c) for c in f"<{PAD}>Alook <{PAD}>"]
    assert len(request(state, sample)["image_data"]) == 2
    assert len(of_group[0]["images"]) == len(of_group[1]["pixel_values"]) == 1
    add_images(sample, [], {})
    assert len(sample.multimodal_inputs["images"]) == 2


def test_a_sample_without_images_gets_one(state):
    sample = asked(state, "text")
    _, inputs = expanded(state, PAD, {"images": [picture(1, 2)]})
    add_images(sample, [picture(1, 2)], inputs)
    assert len(sample.multimodal_train_inputs["pixel_values"]) == 2
    again = without_response(sample)
    assert again.multimodal_inputs == {"images": []}
    again.tokens = prompt_token_ids(state, again)
    complete([again], None)
    assert again.multimodal_train_inputs is None


def test_texts_must_have_a_placeholder_for_each_image(state):
    for text, given in ((f"{PAD}{PAD}", [picture(1, 1)]), (PAD, []), ("", [picture(1, 1)])):
        with pytest.raises(PlacesError, match=rf"has {text.count(PAD)} times .*, and {len(given)} images"):
            expanded(state, text, {"images": given})


def test_joined_tensors():
    one, other = {"a": torch.zeros(2, 3)}, {"a": torch.ones(1, 3), "b": torch.ones(1)}
    assert joined(None, one)["a"].shape == (2, 3)
    assert {key: value.shape[0] for key, value in joined(one, other).items()} == {"a": 3, "b": 1}


def test_state_files_keep_images_and_leave_out_what_is_made_of_them(state):
    sample = asked(state, f"<{PAD}>", picture(3, 2, 5))
    sample.append_response_tokens(tokens=[65], log_probs=[-1.0], text="A")
    add_images(sample, [picture(1, 2, 6)], expanded(state, PAD, {"images": [picture(1, 2, 6)]})[1])
    given = Sample(index=5, tokens=[1], multimodal_inputs={"images": [picture(1, 1)]})
    given.multimodal_train_inputs = {"pixel_values": torch.full((1, 3), 0.25)}  # of a generate function of the user's
    expected = {key: value.clone() for key, value in sample.multimodal_train_inputs.items()}
    text = json.dumps(encode_group([sample, given]))
    assert len(text) < 4000
    found, of_user = decode_group(json.loads(text))
    assert torch.equal(of_user.multimodal_train_inputs["pixel_values"], torch.full((1, 3), 0.25))
    assert found.multimodal_train_inputs is None
    assert [image.getpixel((0, 0)) for image in found.multimodal_inputs["images"]] == [(5, 5, 5), (6, 6, 6)]
    assert found.tokens == sample.tokens
    complete([found, of_user], lambda: state)
    assert found.multimodal_train_inputs.keys() == expected.keys()
    assert all(torch.equal(found.multimodal_train_inputs[key], expected[key]) for key in expected)
    assert sample.multimodal_train_inputs is not None
    complete([sample, given], None)  # nothing is missing: no processor is needed


def test_files_keep_images_whose_png_is_larger_than_what_they_were_read_from(state, monkeypatch, tmp_path):
    sample = asked(state, f"<{PAD}>", picture(2, 2, 5))
    monkeypatch.setattr(images, "MAX_BYTES", 50)
    save_rollout(tmp_path / "dump.pt", 0, [sample])
    kept = [decode_group(json.loads(json.dumps(encode_group(sample)))), *load_rollout(tmp_path / "dump.pt")]
    assert [one.multimodal_inputs["images"][0].getpixel((0, 0)) for one in kept] == [(5, 5, 5)] * 2


def test_images_in_a_turn_after_a_state_file(state):
    sample = asked(state, f"<{PAD}>", picture(1, 1, 5))
    found = decode_group(json.loads(json.dumps(encode_group(sample))))
    add_images(found, [picture(1, 1, 6)], expanded(state, PAD, {"images": [picture(1, 1, 6)]})[1])
    complete([found], lambda: state)
    assert found.multimodal_train_inputs["pixel_values"][:, 0].tolist() == [5, 6]


def test_a_group_prepares_its_images_once_beside_the_event_loop(state, monkeypatch):
    made, threads = [], set()
    encode = image_tokens.encode_image_for_rollout_engine

    def counting(image: Any) -> str:
        made.append(image)
        threads.add(threading.current_thread().name)
        return encode(image)

    monkeypatch.setattr(image_tokens, "encode_image_for_rollout_engine", counting)
    image = picture(2, 2, 99)
    group = [Sample(index=i, prompt=f"<{PAD}>", multimodal_inputs={"images": [image]}) for i in range(8)]

    async def all_of_them() -> None:
        await asyncio.gather(*(prepare(state, sample) for sample in group))

    asyncio.run(all_of_them())
    assert len(made) == 1
    assert all(name.startswith("images") for name in threads)
    for sample in group:
        sample.tokens = prompt_token_ids(state, sample)
        request(state, sample)
    assert len(made) == 1
    tensors = [sample.multimodal_train_inputs["pixel_values"] for sample in group]
    assert all(tensor is tensors[0] for tensor in tensors)


def test_what_the_processor_raises_reaches_the_request(state):
    sample = Sample(index=0, prompt="no place", multimodal_inputs={"images": [picture(1, 1)]})
    asyncio.run(prepare(state, sample))
    with pytest.raises(PlacesError):
        prompt_token_ids(state, sample)


def test_dumps_keep_images_and_pixels(state, tmp_path):
    image = picture(2, 1, 5)
    group = [asked(state, f"<{PAD}>", image) for _ in range(4)]
    add_images(group[0], [picture(1, 1, 6)], expanded(state, PAD, {"images": [picture(1, 1, 6)]})[1])
    save_rollout(tmp_path / "dump.pt", 3, group)
    found = load_rollout(tmp_path / "dump.pt")
    for one, other in zip(found, group, strict=True):
        pixels = other.multimodal_train_inputs["pixel_values"]
        assert torch.equal(one.multimodal_train_inputs["pixel_values"], pixels)
        assert [i.tobytes() for i in one.multimodal_inputs["images"]] == [
            i.tobytes() for i in other.multimodal_inputs["images"]
        ]
    assert without_response(found[0]).multimodal_inputs["images"][0].tobytes() == image.tobytes()
    assert len(without_response(found[0]).multimodal_inputs["images"]) == 1


def test_large_images_do_not_stay(monkeypatch):
    monkeypatch.setattr(image_tokens, "MOST_PIXELS", 3 * PATCH**2)
    held, made = image_tokens.OfImages(10), []
    one, other, large = picture(1, 1), picture(2, 1), picture(2, 2)
    for image in (one, one, other, one, large, large, picture(1, 1), one):
        held.of("k", [image], lambda image=image: made.append(image))
    # the large one is never kept; the third small one makes the first give way
    assert [sum(found is image for found in made) for image in (one, other, large)] == [2, 1, 2]
