"""An optimizer without moments, sleep without copies of the weights, and what is measured of memory: two
data-parallel ranks, each of which has half of the optimizer.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed import run_distributed
from tests.support.trainer import tiny_checkpoint


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("memory")
    arguments = {"checkpoint": tiny_checkpoint(folder / "model", seed=0), "folder": str(folder)}
    found = run_distributed("tests.support.trainer_memory_ranks:memory_scenarios", 2, arguments, timeout=300)
    return [{**one, "profiles": sorted((folder / "profile").iterdir())} for one in found]


def test_memory_is_that_of_the_rank_with_most(ranks: Any) -> None:
    first, second = (found["memory"] for found in ranks)
    assert first == second
    assert first["perf/memory/copied"] == 2 / 2**30
    assert 0.01 < first["perf/memory/rss"] < 100


def test_profiles_are_of_the_ranks_rollouts_and_targets_asked_for(ranks: Any) -> None:
    names = [path.name for path in ranks[0]["profiles"]]
    assert names == [f"train_{what}_rollout1_actor_rank1.pt.trace.json.gz" for what in ("actor", "log_probs")]
    for path in ranks[0]["profiles"]:
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
        assert any(event.get("name") in ("aten::mm", "mkldnn::_linear_pointwise") for event in events)


def test_the_first_step_is_adams_and_nothing_is_kept(ranks: Any) -> None:
    for found in ranks:
        stateless, adam = found["stateless"]["stateless after a step"], found["stateless"]["adam after a step"]
        for name, value in adam.items():
            torch.testing.assert_close(stateless[name], value, rtol=0, atol=1e-6)
        assert found["stateless"]["adam keeps"]
        assert found["stateless"]["stateless keeps"] == []


def test_a_run_without_moments_resumes_from_its_weights_and_its_schedule(ranks: Any) -> None:
    for found in ranks:
        uninterrupted, again, tensor_parallel = found["stateless"]["resumed"]
        assert again["loaded_equal"]
        assert again["start"] == tensor_parallel["start"] == 1
        assert again["steps"] == uninterrupted["steps"]
        assert again["scheduler"] == tensor_parallel["scheduler"] == uninterrupted["scheduler"] == 2 * 8
        for name, value in uninterrupted["parameters"].items():
            assert torch.equal(again["parameters"][name], value), name


@pytest.mark.parametrize("way", ["rebuilt", "copied"])
def test_a_bf16_trainer_is_onloaded_as_it_was_offloaded(ranks: Any, way: str) -> None:
    for found in ranks:
        report = found["bf16"][way]
        assert report["dtype"] is torch.bfloat16
        assert report["asleep"] == report["asleep again"] == 0
        assert report["export"], "the weights were others while the trainer slept"
        assert report["parameters"]
        assert report["optimizer"]
        for name, value in found["bf16"]["awake"].items():
            assert torch.equal(report["trained"][name], value), name


def test_weights_that_masters_give_have_no_copy(ranks: Any) -> None:
    for found in ranks:
        rebuilt, copied = found["bf16"]["rebuilt"], found["bf16"]["copied"]
        assert copied["on the host"] - rebuilt["on the host"] == rebuilt["buffers"] >= rebuilt["weights"]
        assert found["bf16"]["others are kept"]
