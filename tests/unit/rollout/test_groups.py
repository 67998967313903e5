"""Copies of groups stay as they are, whatever is done to the original."""

from __future__ import annotations

import copy
import threading

import torch
from PIL import Image

from slime.observability.trace_utils import trace_span
from slime.rollout.groups import copy_group, copy_prompt, copy_sample, without_response
from slime.rollout.requests.images import add_images
from slime.utils.types import Sample


def full_sample() -> Sample:
    sample = Sample(group_index=3, index=7, prompt=[{"role": "user", "content": "hi"}], label="l")
    sample.append_response_tokens(
        tokens=[1, 2], log_probs=[-0.5, -1.0], text="ab", meta_info={"finish_reason": "stop", "weight_version": "4"}
    )
    sample.metadata = {"deep": {"list": [1]}}
    sample.multimodal_inputs = {"images": [object()]}
    sample.extra = [1, 2]  # type: ignore[attr-defined]
    return sample


def test_a_copy_equals_a_deep_copy_and_shares_nothing_that_changes() -> None:
    sample = full_sample()
    sample.multimodal_inputs = None
    expected = copy.deepcopy(sample)
    ours = copy_group([[sample], sample])
    sample.tokens.append(9)
    sample.weight_versions.append("5")
    sample.prompt.append({"role": "assistant"})  # type: ignore[union-attr]
    sample.metadata["deep"]["list"].append(2)
    sample.spec_info.completion_token_num = 5
    sample.prefix_cache_info.cached_tokens = 5
    sample.extra.append(3)  # type: ignore[attr-defined]
    sample.status = Sample.Status.ABORTED
    sample.later = True  # type: ignore[attr-defined]
    for found in (ours[0][0], ours[1]):
        assert found == expected
        assert found.__dict__ == expected.__dict__


def test_a_copy_has_a_trace_of_its_own() -> None:
    sample = full_sample()
    with trace_span(sample, "generate", {"max_new_tokens": 4}):
        found = copy_sample(sample)
        before = copy.deepcopy(found.trace)
    assert found.trace == before
    assert len(sample.trace["events"]) == 2  # type: ignore[index]
    sample.trace["attempt"] += 1  # type: ignore[index]
    assert found.trace["attempt"] == 0  # type: ignore[index]


def test_large_things_are_shared() -> None:
    sample = full_sample()
    sample.rollout_routed_experts = torch.zeros(2, 2)
    found = copy_sample(sample)
    assert found.rollout_routed_experts is sample.rollout_routed_experts
    assert found.multimodal_inputs is not None
    assert found.multimodal_inputs is not sample.multimodal_inputs
    assert found.multimodal_inputs["images"] is sample.multimodal_inputs["images"]  # type: ignore[index]


def test_what_cannot_be_copied_is_shared() -> None:
    lock = threading.Lock()
    found = copy_sample(Sample(metadata={"lock": lock}))
    assert found.metadata == {"lock": lock}
    tensor = torch.ones(1, requires_grad=True) * 2  # deep copies of what a graph made raise
    assert copy_sample(Sample(train_metadata={"t": tensor})).train_metadata["t"] is tensor  # type: ignore[index]


def test_a_copied_prompt_shares_nothing():
    sample = full_sample()
    sample.multimodal_inputs = {"images": [[1, 2]]}
    expected = copy.deepcopy(sample)
    found = copy_prompt(sample)
    sample.prompt[0]["content"] = "changed"  # type: ignore[index, call-overload]
    sample.metadata["deep"]["list"].append(2)
    sample.multimodal_inputs["images"][0].append(3)
    sample.spec_info.completion_token_num = 5
    sample.prefix_cache_info.cached_tokens = 5
    for name, value in expected.__dict__.items():
        assert getattr(found, name) == value, name
        if isinstance(value, (list, dict)):
            assert getattr(found, name) is not getattr(sample, name), name
    assert copy_prompt(Sample(prompt="p")) == Sample(prompt="p")


def test_images_are_shared_by_the_samples_of_a_group() -> None:
    image = Image.new("RGB", (2, 2))
    prompt = Sample(prompt="p", multimodal_inputs={"images": [image], "videos": None})
    one, other = copy_prompt(prompt), copy_prompt(prompt)
    assert one.multimodal_inputs["images"][0] is other.multimodal_inputs["images"][0] is image
    one.multimodal_inputs["images"].append(image)
    assert len(prompt.multimodal_inputs["images"]) == len(other.multimodal_inputs["images"]) == 1


def test_a_new_start_has_the_images_of_the_prompt() -> None:
    first, later = (Image.new("RGB", (side, side)) for side in (2, 3))
    sample = Sample(prompt="p", tokens=[1, 7, 7], multimodal_inputs={"images": [first]})
    sample.multimodal_train_inputs = {"pixel_values": torch.ones(2, 3)}
    assert without_response(sample).tokens == [1, 7, 7]
    assert without_response(sample).multimodal_train_inputs is not None
    for _ in range(2):
        sample.append_response_tokens(tokens=[5], log_probs=[-1.0])
        sample.append_response_tokens(tokens=[7], trainable=False)
        add_images(sample, [later], {"pixel_values": torch.zeros(1, 3)})
    assert sample.multimodal_train_inputs["pixel_values"].tolist() == [[1] * 3] * 2 + [[0] * 3] * 2
    again = without_response(Sample.from_dict(sample.to_dict()))
    assert again.multimodal_inputs == {"images": [first]}
    # ids and tensors are made of the prompt again
    assert (again.tokens, again.multimodal_train_inputs, again.response_length) == ([], None, 0)
    assert len(sample.multimodal_inputs["images"]) == 3
