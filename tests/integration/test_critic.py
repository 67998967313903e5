"""PPO's critic on real Megatron: against plain torch, under every layout, with its values at the actor, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import critic_ranks, plain_ppo
from tests.support.distributed import run_distributed
from tests.support.trainer import make_train_data, tiny_checkpoint, trainer_args

ALONE: dict[str, dict[str, Any]] = {
    "1 process": {},
    "packed by tokens": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64},
}
PAIRED: dict[str, dict[str, Any]] = {
    "TP2": {"tensor_model_parallel_size": 2},
    "TP2+SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2, packed": {"pipeline_model_parallel_size": 2, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 64},
    "PP2 x VPP2": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "overlap_p2p_comm": True,
    },
    "CP2": {"context_parallel_size": 2},
    "DP2": {},
}
OTHERS = [name for name in [*ALONE, *PAIRED] if name != "1 process"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("critic")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> str:
    return tiny_checkpoint(folder / "model", seed=0, num_hidden_layers=4)


@pytest.fixture(scope="module")
def alone(checkpoint: str, folder: Path) -> dict[str, Any]:
    arguments = {"checkpoint": checkpoint, "folder": str(folder), "scenarios": list(ALONE.values())}
    return run_distributed("tests.support.critic_ranks:alone", 1, arguments, timeout=400)[0]


@pytest.fixture(scope="module")
def pair(checkpoint: str, folder: Path, alone: Any) -> list[dict[str, Any]]:
    arguments = {
        "checkpoint": checkpoint,
        "save": str(folder / "critic"),
        "scenarios": list(PAIRED.values()),
        "resumed": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    }
    return run_distributed("tests.support.critic_ranks:pairs", 2, arguments, timeout=600)


@pytest.fixture(scope="module")
def layouts(alone: Any, pair: Any) -> dict[str, list[dict[str, Any]]]:
    """By layout: what every rank found."""
    found = {name: [result] for name, result in zip(ALONE, alone["layouts"], strict=True)}
    return found | {name: [rank["layouts"][i] for rank in pair] for i, name in enumerate(PAIRED)}


def ppo_args(checkpoint: str, **settings: Any) -> Any:
    args = trainer_args(checkpoint)
    vars(args).update({**critic_ranks.PPO, **critic_ranks.CRITIC, **settings})
    return args


def logged(ranks: list[dict[str, Any]], role: str) -> list[dict[str, list[float]]]:
    """Per rollout what the one rank that logs has logged."""
    [of_one] = [rank[role] for rank in ranks if rank[role][0]["logged"]]
    return [report["logged"] for report in of_one]


def captured(ranks: list[dict[str, Any]], rollout: int, name: str) -> dict[int, torch.Tensor]:
    """Return the inputs of the actor's loss, by sample index, from all ranks that have them."""
    return {index: t for rank in ranks for index, t in rank["actor"][rollout]["captured"].get(name, {}).items()}


# Against plain torch


def test_values_losses_and_gradients_are_those_of_plain_torch(alone: Any, checkpoint: str) -> None:
    found = alone["gradients"]
    head = (found["head"]["weight"], found["head"]["bias"])
    args = ppo_args(checkpoint, **critic_ranks.SGD, lr=0.02)
    old, steps = plain_ppo.train_critic(args, checkpoint, head, make_train_data(seed=0))
    for value, expected in zip(found["result"]["values"], old, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=2e-6)
    assert 0 < steps[1]["value_clipfrac"] < 1  # the second step is clipped in part: its gradients check that
    for name in ("value_loss", "value_clipfrac", "grad_norm"):
        values = found["logged"][f"train/critic-{name}"]
        assert values == pytest.approx([step[name] for step in steps], rel=1e-5, abs=1e-7), name
    last = steps[-1]
    scale = max(float(g.abs().max()) for g in last["grads"].values())
    assert found["grads"].keys() == last["grads"].keys()
    for name, expected in last["grads"].items():
        torch.testing.assert_close(found["grads"][name], expected, rtol=1e-4, atol=1e-5 * scale, msg=name)
    for gradient, expected in zip(found["head_grads"], last["head_grads"], strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5 * scale)


def test_advantages_of_the_actor_are_gae_of_the_critics_values(layouts: Any, checkpoint: str) -> None:
    """The KL penalty of every trained token and the reward at the last, through GAE with the critic's values."""
    ranks, args, data = layouts["1 process"], ppo_args(checkpoint), make_train_data(seed=1)
    values, kl = captured(ranks, 1, "values"), captured(ranks, 1, "kl")
    returns, advantages = captured(ranks, 1, "returns"), captured(ranks, 1, "advantages")
    assert max(float(k.abs().max()) for k in kl.values()) > 1e-3
    expected = {}
    for i, index in enumerate(data["sample_indices"]):
        trained = torch.tensor(data["loss_masks"][i]) > 0
        rewards = (-0.1 * kl[index][trained].double()).tolist()
        rewards[-1] += data["rewards"][i]
        found = plain_ppo.gae(rewards, values[index][trained].tolist(), args.gamma, args.lambd)
        expected[index] = torch.tensor(found[0])
        torch.testing.assert_close(returns[index][trained], torch.tensor(found[1]), rtol=1e-5, atol=1e-5)
    everything = torch.cat([*expected.values()])
    for i, index in enumerate(data["sample_indices"]):  # whitened
        whitened = (expected[index] - everything.mean()) / (everything.var() + 1e-8).sqrt()
        trained = torch.tensor(data["loss_masks"][i]) > 0
        torch.testing.assert_close(advantages[index][trained], whitened, rtol=1e-4, atol=1e-5)


# Layouts


@pytest.mark.parametrize("layout", OTHERS)
@pytest.mark.parametrize("role", ["critic", "actor"])
def test_the_layout_does_not_matter(layouts: Any, layout: str, role: str) -> None:
    expected_rollouts, rollouts = logged(layouts["1 process"], role), logged(layouts[layout], role)
    for expected, found in zip(expected_rollouts, rollouts, strict=True):
        names = {name for name in expected if not name.startswith("perf/")}
        assert names == {name for name in found if not name.startswith("perf/")}
        for name in names:
            assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("layout", OTHERS)
def test_every_token_has_its_value_and_its_return_in_every_layout(layouts: Any, layout: str) -> None:
    for rollout in range(2):
        for name in ("values", "returns", "advantages"):
            expected, found = (captured(layouts[where], rollout, name) for where in ("1 process", layout))
            assert expected.keys() == found.keys()
            for index, tensor in expected.items():
                torch.testing.assert_close(found[index], tensor, rtol=1e-4, atol=2e-5)


def test_the_value_head_is_the_same_on_all_ranks(layouts: Any) -> None:
    [first], [last] = ([rank[key] for rank in layouts["1 process"]] for key in ("first head", "head"))
    assert first["weight"].std() == pytest.approx(0.05, rel=0.3)
    assert not first["bias"].any()
    assert (last["weight"] - first["weight"]).abs().max() > 1e-3
    for name in PAIRED:
        heads = [rank for rank in layouts[name] if rank["head"]]
        assert len(heads) == (1 if name.startswith("PP2") else 2)
        for rank in heads:
            assert torch.equal(rank["first head"]["weight"], first["weight"]), name
            torch.testing.assert_close(rank["head"], last, rtol=1e-4, atol=1e-5)


def test_metrics_of_critic_and_actor_have_names_of_their_own(layouts: Any) -> None:
    critic, actor = (logged(layouts["1 process"], role)[0] for role in ("critic", "actor"))
    assert {name for name in critic if name.startswith("train/")} == {
        f"train/critic-{name}" for name in ("value_loss", "value_clipfrac", "grad_norm", "lr-pg_0", "lr-pg_1",
                                            "global_batch_size")
    } & {*critic}  # fmt: skip
    assert {"train/critic-value_loss", "train/critic-value_clipfrac", "train/critic-grad_norm"} <= critic.keys()
    assert {"perf/critic-values_time", "perf/critic-critic_train_time", "perf/critic-train_time"} <= critic.keys()
    assert {"rollout/values", "rollout/returns", "rollout/advantages"} <= actor.keys() & critic.keys()
    assert not any("critic" in name for name in actor)
    own = ("train/critic-", "perf/critic-", "perf/memory/critic-")
    assert [name for name in critic if not name.startswith((*own, "rollout/"))] == []


# Checkpoints and refusals


def test_a_critic_is_resumed_with_its_head(alone: Any, pair: Any) -> None:
    assert (alone["first start"], alone["start"]) == (0, 1)
    assert alone["loaded"].keys() == alone["saved"].keys()
    assert all(torch.equal(alone["loaded"][name], value) for name, value in alone["saved"].items())
    loss = alone["uninterrupted"]["logged"]["train/critic-value_loss"]
    assert alone["resumed"]["logged"]["train/critic-value_loss"] == loss
    for name, value in alone["uninterrupted"]["parameters"].items():
        assert torch.equal(alone["resumed"]["parameters"][name], value), name
    [elsewhere] = [rank["resumed"]["logged"] for rank in pair if rank["resumed"]["logged"]]
    assert elsewhere["train/critic-value_loss"] == pytest.approx(loss, rel=1e-5)
    assert {rank["resumed"]["start"] for rank in pair} == {1}


def test_a_checkpoint_without_a_value_head_gives_the_rest(alone: Any) -> None:
    assert alone["start from the actor"] == 0
    for name, value in alone["from the actor"].items():
        if ".output_layer." in name:
            assert torch.equal(value, alone["fresh head"][name.rpartition(".")[2]])
        else:
            assert torch.equal(value, alone["actor"][name]), name


def test_a_critic_sleeps_like_an_actor(alone: Any) -> None:
    assert alone["asleep"] == 0
    assert all(torch.equal(alone["awake"][name], value) for name, value in alone["from the actor"].items())


@pytest.mark.parametrize(
    ("case", "hint"),
    [
        ("missing", "needs the critic's values"),
        ("too few samples", "values of 7 samples, this rank has 8"),
        ("too short", "sample index 100: the critic sent"),
        ("infinite", "sample index 107: the critic's values are not finite"),
    ],
)
def test_values_that_cannot_be_right_are_refused(alone: Any, case: str, hint: str) -> None:
    assert hint in alone["refusals"][case]
