"""A rollout manager without Ray or engines: its data source, its rollout function and its arguments."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.observability import tracking
from slime.observability.tracking import Tracker
from slime.ray.manager import rollout_manager
from slime.ray.manager.rollout_manager import RolloutManager
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args

HERE = __name__
PATIENCE_S = 60.0


class Source:
    """A data source whose whole state is how many groups it has handed out; it snapshots as the built-in one does."""

    def __init__(self, args: Any) -> None:
        self.args, self.drawn = args, 0
        self.snapshots: dict[int, int] = {}

    def get_samples(self, count: int) -> list[list[Sample]]:
        groups = []
        for _ in range(count):
            number = self.drawn
            self.drawn += 1
            n = self.args.n_samples_per_prompt
            groups.append([Sample(group_index=number, index=number * n + i, prompt=f"p{number}") for i in range(n)])
        return groups

    def snapshot(self, rollout_id: int) -> None:
        self.snapshots[rollout_id] = self.drawn

    def save(self, rollout_id: int) -> None:
        write_state(self.args.save, rollout_id, self.snapshots[rollout_id])

    def load(self, rollout_id: int | None = None) -> None:
        path = state_path(self.args.load, rollout_id) if self.args.load else None
        if path is not None and path.exists():
            self.drawn = json.loads(path.read_text())

    def __len__(self) -> int:
        return 10


class ForgetfulSource(Source):
    """One that only knows the present."""

    snapshot = None  # type: ignore[assignment]

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        del self.snapshots

    def __getattribute__(self, name: str) -> Any:
        if name == "snapshot":
            raise AttributeError(name)
        return super().__getattribute__(name)

    def save(self, rollout_id: int) -> None:
        write_state(self.args.save, rollout_id, self.drawn)


def state_path(root: str, rollout_id: int | None) -> Path:
    return Path(root) / f"drawn_{rollout_id}.json"


def write_state(root: str, rollout_id: int, drawn: int) -> None:
    Path(root).mkdir(parents=True, exist_ok=True)
    state_path(root, rollout_id).write_text(json.dumps(drawn))


def answer(sample: Sample) -> Sample:
    sample.tokens = [7, int(sample.prompt[1:]), 9]  # type: ignore[arg-type]
    sample.response_length = 1
    sample.reward = float((sample.index or 0) % 2)
    sample.status = Sample.Status.COMPLETED
    return sample


def generate(args: Any, rollout_id: int, source: Any, evaluation: bool = False) -> Any:
    if evaluation:
        samples = [answer(Sample(prompt="p3", index=0)), answer(Sample(prompt="p4", index=1))]
        return {"held_out": {"rewards": [s.reward for s in samples], "truncated": [False, True], "samples": samples}}
    groups = source.get_samples(args.rollout_batch_size)
    gate = args.gates.get(rollout_id)
    if gate is not None:  # the prompts are drawn, the answers are not there yet
        gate.drawn.set()
        assert gate.go.wait(PATIENCE_S)
    groups = [[answer(sample) for sample in group] for group in groups]
    return RolloutFnTrainOutput(groups, {"rollout/dropped": 3})


class Gate:
    def __init__(self) -> None:
        self.drawn, self.go = threading.Event(), threading.Event()


def without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rollout managers live in the process of the tests."""
    monkeypatch.setattr(tracking, "_tracker", Tracker())
    monkeypatch.setattr(rollout_manager.worker, "begin", lambda args, name: tmp_path / f"{name}.log")
    monkeypatch.setattr(rollout_manager, "ray", SimpleNamespace(put=lambda shard: shard))
    monkeypatch.setattr(rollout_manager.worker, "gc_freeze", lambda: None)


def set_up(args: Any) -> RolloutManager:
    """Return a manager without engines, for two data-parallel ranks."""
    manager = RolloutManager(args)
    manager.setup((None, [], []), {})
    manager.set_train_parallel_config(
        {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    )
    return manager


def manager_maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RolloutManager]:
    """Return a function that makes a manager; its keyword arguments replace those of the run."""
    without_ray(tmp_path, monkeypatch)

    def build(gates: dict[int, Any] | None = None, **changes: Any) -> RolloutManager:
        base: dict[str, Any] = {
            "run_dir": str(tmp_path / "run"),
            "save": str(tmp_path / "save"),
            "load": None,
            "data_source_path": f"{HERE}.Source",
            "rollout_function_path": f"{HERE}.generate",
            "eval_function_path": f"{HERE}.generate",
            "custom_rollout_log_function_path": None,
            "custom_eval_rollout_log_function_path": None,
            "custom_convert_samples_to_train_data_path": None,
            "custom_reward_post_process_path": None,
            "save_debug_rollout_data": None,
            "load_debug_rollout_data": None,
            "load_debug_rollout_data_subsample": None,
            "debug_train_only": True,
            "debug_rollout_only": False,
            "advantage_estimator": "grpo",
            "rewards_normalization": True,
            "grpo_std_normalization": False,
            "rollout_batch_size": 3,
            "n_samples_per_prompt": 2,
            "global_batch_size": 4,
            "micro_batch_size": 1,
            "use_dynamic_batch_size": False,
            "balance_data": False,
            "balance_by_flops": False,
            "rollout_num_gpus": 1,
            "log_reward_category": None,
            "wandb_always_use_train_step": False,
            "dump_details": None,
        }
        args = rollout_args(**{**base, **changes})
        args.gates = gates or {}
        return set_up(args)

    return build


def trained(boxes: Any) -> list[int]:
    """The indices of the samples in boxed shards, in the order of generation."""
    return sorted(i for box in boxes for i in box.inner.to_rollout_data()["sample_indices"])
