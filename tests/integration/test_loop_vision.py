"""``train.py`` without a GPU on prompts with images: engines see what the trainer sees, also with a trained tower."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.run_train import Run, rl_flags, run_train, sums_file
from tests.support.sockets import listeners
from tests.support.vision_models import make_vision_checkpoint, with_pictures

pytestmark = pytest.mark.integration
WHOLE_QWEN3_5 = ("--spec", "slime_plugins.models.qwen3_5_vl", "get_qwen3_5_vl_model_provider")


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen3_vl", ("--train-vision-tower", "--rollout-data-transport", "nixl")),
        pytest.param("qwen2_5_vl", (), marks=pytest.mark.soak),
        ("qwen3_5", WHOLE_QWEN3_5),
    ],
)
def test_trainer_and_engine_agree(family: str, more: tuple[str, ...], tmp_path: Path) -> None:
    """The second rollout, with the same images, is made with weights that the trainer has pushed."""
    checkpoint = make_vision_checkpoint(tmp_path / "model", family)
    flags = rl_flags(checkpoint, with_pictures(sums_file(tmp_path / "pictures.jsonl", 4)))
    words = ["--num-rollout", "2", "--custom-rm-path", "tests.support.rollout_hooks.every_other", *more]
    run = run_train([*flags, *words, "--multimodal-keys", '{"image": "images"}'], tmp_path / "run")
    differences = run.metric("train/train_rollout_logprob_abs_diff")
    print(family, differences)
    assert len(differences) == 2
    assert max(differences.values()) <= 1e-5
    assert min(run.metric("train/grad_norm").values()) > 0


@pytest.mark.soak
def test_train_data_are_the_same_by_either_transport(tmp_path: Path) -> None:
    """Two ranks train on one dump: equal to the bit. Nothing of NIXL listens beyond loopback."""
    checkpoint = make_vision_checkpoint(tmp_path / "model", "qwen3_vl")
    flags = rl_flags(checkpoint, with_pictures(sums_file(tmp_path / "pictures.jsonl", 4)))
    flags += ["--num-rollout", "2", "--custom-rm-path", "tests.support.rollout_hooks.every_other"]
    flags += ["--multimodal-keys", '{"image": "images"}', "--train-vision-tower", "--actor-num-gpus-per-node", "2"]
    run_train([*flags, "--save-debug-rollout-data", f"{tmp_path}/{{rollout_id}}.pt"], tmp_path / "generated")
    found = []
    for transport in ("object-store", "nixl"):
        words = ["--load-debug-rollout-data", f"{tmp_path}/{{rollout_id}}.pt", "--rollout-data-transport", transport]
        with Run([*flags, *words], tmp_path / transport) as run:
            run.wait_for("rollout 0 of 2", 240)
            assert {one.address for one in listeners([*run.processes(), run.process.pid])} <= {"127.0.0.1", "::1"}
            replayed = run.finish(240)
        found.append({name: replayed.metric(name) for name in ("train/loss", "train/grad_norm")})
    assert sorted(found[0]["train/grad_norm"]) == [0, 1]
    assert found[0] == found[1]
