"""Resuming without saved random states, and with a reference model that was refreshed before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.distributed import run_distributed
from tests.support.ranks import same_tensors
from tests.support.trainer import tiny_checkpoint


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("resume")
    arguments = {"checkpoint": tiny_checkpoint(folder / "model", seed=0), "save": str(folder / "save")}
    return run_distributed("tests.support.resume_ranks:resume_options", 1, arguments, timeout=180)[0]


def test_a_checkpoint_without_random_states_can_be_resumed(found: dict[str, Any]) -> None:
    assert found["start"] == 2
    assert same_tensors(found["resumed"], found["after 1"])


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("reference, interval 1", "after 1"),
        ("reference, interval 2", "after 1"),
        ("reference, interval 3", "initial"),  # never refreshed yet
        ("reference of step 0", "after 0"),
    ],
)
def test_the_reference_is_the_one_of_before(found: dict[str, Any], reference: str, expected: str) -> None:
    others = {"initial", "after 0", "after 1"} - {expected}
    assert same_tensors(found[reference], found[expected])
    assert not any(same_tensors(found[reference], found[other]) for other in others)


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_the_actor_is_resumed_whatever_the_reference(found: dict[str, Any], interval: int) -> None:
    assert same_tensors(found[f"actor, interval {interval}"], found["after 1"])


def test_the_learning_rate_is_this_run_s_or_the_checkpoint_s_as_asked(found: dict[str, Any]) -> None:
    own = found["rates"]["own"]
    assert len(own) == 1
    assert found["rates"]["the checkpoint's"] == own
    assert found["rates"]["new"] == [(5e-5, 5e-5)]
    assert own != [(5e-5, 5e-5)]


def test_a_model_of_which_one_layer_is_trained_resumes(found: dict[str, Any]) -> None:
    part = found["one layer"]
    assert part["start"] == 1
    assert "look at --only-train-params-name-list and --freeze-params-name-list" in part["all"]
    assert part["the other"] != "nothing was raised"
    assert same_tensors(part["resumed"], part["went on"])
    changed = {name for name, value in part["initial"].items() if not torch.equal(value, part["went on"][name])}
    assert changed == {name for name in part["initial"] if "layers.1." in name}
