"""Fields that a router would drop are passed as labels, and engines make fields of them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from slime.rollout.requests.generate_request import generate_payload
from slime.rollout.requests.generate_state import train_sampling_params
from slime.utils.image_tokens import FORBIDDEN, without_placeholders
from slime.utils.types import Sample
from tests.support.engine_plugin import engine_plugin
from tests.support.rollout_args import rollout_args


@pytest.fixture
def plugin() -> Iterator[Any]:
    with engine_plugin() as load:
        yield load("server.request_fields")


def normalized(plugin: Any, payload: dict[str, Any]) -> SimpleNamespace:
    request = SimpleNamespace(
        sampling_params=payload.get("sampling_params"),
        custom_labels=payload.get("custom_labels"),
        return_sampling_mask=None,
        return_routed_experts=False,
    )
    assert plugin.read_request_fields(lambda r, more: (r, more), request, 7) == (request, 7)
    return request


def payload(*, evaluation: bool = False, **flags: Any) -> dict[str, Any]:
    args = rollout_args(**flags)
    asked = generate_payload(args, Sample(tokens=[1]), train_sampling_params(args), evaluation)
    assert asked is not None
    return asked


@pytest.mark.parametrize("flags", [{"rollout_top_p": 0.9}, {"use_rollout_routing_replay": True}])
def test_what_gets_through_a_router_becomes_fields(plugin: Any, flags: dict[str, Any]) -> None:
    whole = payload(**flags)
    routed = {key: whole[key] for key in ("input_ids", "custom_labels")}  # sglang-router 0.3.2
    request = normalized(plugin, routed)
    assert request.return_sampling_mask is (True if "rollout_top_p" in flags else None)
    assert request.return_routed_experts is ("use_rollout_routing_replay" in flags)
    assert request.custom_labels is None


def test_engines_that_are_asked_directly_heed_custom_params(plugin: Any) -> None:
    request = normalized(plugin, {"sampling_params": {"custom_params": {"mine": 1, "return_top_p_token_ids": True}}})
    assert request.return_sampling_mask is True
    assert request.sampling_params == {"custom_params": {"mine": 1}}
    alone = normalized(plugin, {"sampling_params": {"custom_params": {"return_top_p_token_ids": True}}})
    assert alone.sampling_params == {}


def test_placeholders_are_forbidden_behind_a_router(plugin: Any) -> None:
    asked = without_placeholders(
        {"sampling_params": {"logit_bias": {"3": 1.5}}, "custom_labels": {"team": "a"}}, [7, 9]
    )
    bias = {"3": 1.5, "7": FORBIDDEN, "9": FORBIDDEN}
    assert asked["sampling_params"] == {"logit_bias": bias}  # what engines without the plugin read
    assert FORBIDDEN == plugin.FORBIDDEN < -100
    labels = asked["custom_labels"]
    request = normalized(plugin, {**asked, "custom_labels": dict(labels)})
    assert (request.sampling_params, request.custom_labels) == ({"logit_bias": bias}, {"team": "a"})
    for params in ({"top_p": 1.0}, None):
        routed = normalized(plugin, {"sampling_params": params, "custom_labels": dict(labels)})
        assert routed.sampling_params == {**(params or {}), "logit_bias": {"7": FORBIDDEN, "9": FORBIDDEN}}
    batch = normalized(plugin, {"sampling_params": [{}, {}], "custom_labels": dict(labels)})
    assert batch.sampling_params == [{"logit_bias": {"7": FORBIDDEN, "9": FORBIDDEN}}] * 2


def test_nothing_is_asked_for_unasked(plugin: Any) -> None:
    assert "custom_labels" not in payload()
    of_evaluation = payload(evaluation=True, rollout_top_p=0.9, use_rollout_routing_replay=True)
    assert not {"return_sampling_mask", "return_routed_experts", "custom_labels"} & of_evaluation.keys()
    for labels in (None, {"team": "a"}, [{"slime_return_sampling_mask": "true"}]):
        request = normalized(plugin, {"custom_labels": labels})
        assert (request.return_sampling_mask, request.return_routed_experts) == (None, False)
        assert request.custom_labels == labels
