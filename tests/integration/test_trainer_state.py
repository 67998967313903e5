"""Resume is exact, in the same layout to the bit; nothing half-written is ever read; sleep loses nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed import run_distributed
from tests.support.trainer import tiny_checkpoint

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2+SP": TP2,
    "DP2": {},
    "PP2": {"pipeline_model_parallel_size": 2},
    "CP2": {"context_parallel_size": 2},
}
ALGORITHM = {"adam_eps": 1e-3, "entropy_coef": 0.01, "lr_decay_style": "cosine", "lr_warmup_iters": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> str:
    return tiny_checkpoint(folder / "model", seed=0)


@pytest.fixture(scope="module")
def resumed(checkpoint: str, folder: Path) -> list[list[dict[str, Any]]]:
    """By rank: the uninterrupted run, then the runs resumed under each layout."""
    arguments = {
        "checkpoint": checkpoint,
        "save": str(folder / "resume"),
        "layouts": list(LAYOUTS.values()),
        **ALGORITHM,
    }
    return run_distributed("tests.support.trainer_ranks:resume_scenario", 2, arguments, timeout=300)


def test_resume_in_the_same_layout_is_exact_to_the_bit(resumed: Any) -> None:
    for uninterrupted, again, *_ in resumed:
        assert again["loaded_equal"]
        assert again["start"] == 2
        assert again["steps"] == uninterrupted["steps"]
        assert again["scheduler"] == uninterrupted["scheduler"] == 4 * 8
        assert again["parameters"].keys() == uninterrupted["parameters"].keys()
        for name, value in uninterrupted["parameters"].items():
            assert torch.equal(again["parameters"][name], value), name


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_resume_under_another_layout(resumed: Any, layout: str) -> None:
    uninterrupted, here = resumed[-1][0], resumed[-1][1 + list(LAYOUTS).index(layout)]
    assert here["start"] == 2
    for expected, steps in zip(uninterrupted["steps"], here["steps"], strict=True):
        for name, value in expected[0].items():
            assert steps[0][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.fixture(scope="module")
def state(checkpoint: str, folder: Path) -> dict[str, Any]:
    killed = folder / "killed"
    arguments = {"checkpoint": checkpoint, "save": str(killed)}
    with pytest.raises(RuntimeError, match=r"exit status -9"):
        run_distributed("tests.support.trainer_ranks:killed_while_saving", 1, arguments, timeout=120)
    assert (killed / "iter_0000001.writing").is_dir()  # it did die in the middle
    arguments = {"checkpoint": checkpoint, "folder": str(folder), "killed": str(killed)}
    found = run_distributed("tests.support.trainer_ranks:state_scenarios", 1, arguments, timeout=300)[0]
    found["parameters before the kill"] = torch.load(killed / "parameters.pt", weights_only=True)
    return found


def test_killed_while_saving_resumes_from_the_checkpoint_before(state: Any) -> None:
    assert state["start after the kill"] == 1
    for name, value in state["parameters before the kill"].items():
        assert torch.equal(state["parameters after the kill"][name], value), name
    assert state["tracker after the next save"] == "1"


def test_background_save_holds_the_moment_it_was_asked_for(state: Any) -> None:
    assert state["start after a background save"] == 1
    assert state["background save is of its moment"]
    for name, value in state["uninterrupted"].items():
        assert torch.equal(state["resumed"][name], value), name


def test_other_starts_take_the_same_weights(state: Any) -> None:
    assert state["start with finetune"] == 0
    assert state["finetune takes the weights"]
    assert state["start from the export"] == 0
    assert state["export has the weights"]
    assert state["start without optimizer"] == 1
    assert state["weights without optimizer"]


def test_missing_optimizer_state_is_refused(state: Any) -> None:
    assert "--no-load-optim" in state["refusal without optimizer"]
    assert "--finetune" in state["refusal without optimizer"]


def test_offload_and_onload_lose_nothing(state: Any) -> None:
    for name in ("bytes of parameters asleep", "bytes of gradients asleep", "bytes of parameters after the export"):
        assert state[name] == 0, name
    for name in ("weights can be exported asleep", "parameters are back", "optimizer state is back"):
        assert state[name], name
    assert state["sleep changes nothing"]
    assert "onload()" in state["refusal to train asleep"]
