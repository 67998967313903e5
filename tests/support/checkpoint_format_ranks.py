"""Ranks of ``tests/integration/test_checkpoint_formats.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.critic_ranks import start as start_role
from tests.support.ranks import error_of, new_trainer, same_tensors
from tests.support.trainer import make_train_data
from tests.support.trainer_ranks import parameters, train_once


def resume_each(folder: str, checkpoints: dict[str, str], cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Save after a rollout and continue, then load and continue, for each of ``cases``: {family, form, flags, then}.

    ``then``: flags of the run that loads, which replace those of the one that saves. Returns per case {"files" of the
    checkpoint, "start", "loaded": whether parameters and random numbers are those saved, "same": whether the next
    rollout gives the same bits, "close": the largest difference of parameters, "steps": of both, "error"}.
    """
    return {name: _resume(folder, name, checkpoints, **case) for name, case in cases.items()}


def _resume(
    folder: str,
    name: str,
    checkpoints: dict[str, str],
    *,
    family: str = "dense",
    form: str,
    flags: dict[str, Any],
    then: dict[str, Any] | None = None,
    cut: str | None = None,
) -> dict[str, Any]:
    save = Path(folder, name)
    trainer, _ = new_trainer(checkpoints[family], save=str(save), ckpt_format=form, **flags)
    train_once(trainer, 0, make_train_data(seed=0))
    trainer.save(0, force_sync=True)
    drawn, saved = torch.rand(4), parameters(trainer)
    step = train_once(trainer, 1, make_train_data(seed=1))["steps"]
    expected = parameters(trainer)
    directory = save / "iter_0000000"
    files = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    if cut is not None and dist.get_rank() == 0:
        path = directory / cut
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    dist.barrier()
    found: dict[str, Any] = {"files": files}
    try:
        trainer, found["start"] = new_trainer(checkpoints[family], load=str(save), **{**flags, **(then or {})})
    except ValueError as e:
        return {**found, "error": str(e)}
    found["loaded"] = same_tensors(parameters(trainer), saved) and torch.equal(torch.rand(4), drawn)
    found["steps"] = [step, train_once(trainer, 1, make_train_data(seed=1))["steps"]]
    after = parameters(trainer)
    found["same"] = same_tensors(after, expected)
    found["close"] = max(float((after[key] - value).abs().max()) for key, value in expected.items())
    found["moved"] = max(float((expected[key] - value).abs().max()) for key, value in saved.items())
    return found


def convert_and_start_from(folder: str, checkpoint: str) -> dict[str, Any]:
    """Go from ``torch`` to ``torch_dist`` and on under another layout; take ``torch`` weights elsewhere.

    Returns {"start": after that, "frozen": the error with others trained}, and whether weights are those saved:
    {"by torch_dist", "reference", "base of adapters", "critic", "critic of the model"}.
    """
    save, again = str(Path(folder, "first")), str(Path(folder, "second"))
    tp2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    trainer, _ = new_trainer(checkpoint, save=save, ckpt_format="torch", **tp2)
    train_once(trainer, 0, make_train_data(seed=0))
    trainer.save(0, force_sync=True)
    saved = parameters(trainer)
    found: dict[str, Any] = {}
    trainer, start = new_trainer(checkpoint, load=save, save=again, **tp2)
    trainer.save(start, force_sync=True)
    trainer, found["start"] = new_trainer(checkpoint, load=again, pipeline_model_parallel_size=2)
    trainer, _ = new_trainer(checkpoint, load=again, **tp2)
    found["by torch_dist"] = same_tensors(parameters(trainer), saved)
    trainer, _ = new_trainer(checkpoint, with_ref=True, ref_load=save, load=checkpoint, use_kl_loss=True, **tp2)
    trainer._backup.save("actor")
    trainer._backup.activate("ref")
    found["reference"] = same_tensors(parameters(trainer), saved)
    trainer, _ = new_trainer(checkpoint, ref_load=save, load=save, lora_rank=2, lora_alpha=4.0, **tp2)
    base = {name: value for name, value in parameters(trainer).items() if ".adapter." not in name}
    found["base of adapters"] = same_tensors(base, saved) and len(parameters(trainer)) > len(base)
    frozen = {"only_train_params_name_list": [r"layers\.1\."], **tp2}
    found["frozen"] = error_of(lambda: new_trainer(checkpoint, load=save, **frozen))
    critic, _ = start_role("critic", checkpoint, load=save, save=f"{folder}/critic", ckpt_format="torch", **tp2)
    found["critic of the model"] = all(
        torch.equal(value, saved[name]) for name, value in parameters(critic).items() if "output_layer" not in name
    )
    critic.save(0, force_sync=True)
    again, first = start_role("critic", checkpoint, load=f"{folder}/critic", **tp2)
    found["critic"] = first == 1 and same_tensors(parameters(again), parameters(critic))
    return found
