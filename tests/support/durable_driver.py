"""A run without trainer that may be killed at any moment: the real loop and rollout manager, a trainer that counts.

The "model" is the list of samples trained on, step by step, saved as checkpoints are: written whole, then the tracker
is replaced. What was generated and what was trained on is also appended to two logs that no code of the run reads.
Start it with ``python -m tests.support.durable_driver '<json of arguments>'``; it ends when all is trained.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime.driver import Loop
from slime.ray.manager import rollout_manager
from slime.ray.manager.rollout_manager import RolloutManager
from slime.rollout import data_source, sglang_rollout
from slime.rollout.base_types import iter_samples
from slime.rollout.durable import journal_writer
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.groups import copy_sample
from slime.servers.http_utils import init_http_client
from slime.utils.atomic_file import write_atomically
from slime.utils.types import Sample
from tests.support import durable_points
from tests.support.rollout_args import CharTokenizer, rollout_args

TRACKER = "latest_checkpointed_iteration.txt"


class Rollout:
    """The rollout manager as the loop sees it, without Ray."""

    def __init__(self, manager: RolloutManager) -> None:
        self.manager = manager
        self.threads = ThreadPoolExecutor(1)

    def start_generate(self, rollout_id: int) -> Future[Any]:
        return self.threads.submit(self.manager.generate, rollout_id)

    def wait_generate(self, started: Future[Any], rollout_id: int) -> Any:
        return started.result()

    def save(self, rollout_id: int) -> None:
        self.manager.save(rollout_id)


class CountingTrainer:
    """ "Trains" by noting the groups of each step; saves and loads what it noted."""

    canary = None

    def __init__(self, args: Any) -> None:
        self.args = args
        tracker = Path(args.save) / TRACKER
        self.last = int(tracker.read_text()) if tracker.exists() else -1
        self.trained = read_model(args.save, self.last) if self.last >= 0 else []

    def async_train(self, rollout_id: int, data: Any, external_data: Any = None) -> list[Any]:
        samples = sorted(i for box in data for i in indices(box))
        self.trained.append(samples)
        append(self.args.test_folder, "trained", {"rollout": rollout_id, "samples": samples})
        return []

    def wait(self, refs: list[Any], what: str) -> list[Any]:
        return []

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        write_atomically(Path(self.args.save) / f"model_{rollout_id}.json", json.dumps(self.trained))
        write_atomically(Path(self.args.save) / TRACKER, f"{rollout_id}\n")

    def update_weights(self, synchronous_loop: bool = True) -> int:
        return 0

    def clear_memory(self) -> None:
        pass

    def finish(self) -> None:
        pass


def indices(box: Any) -> list[int]:
    return list(box.inner.to_rollout_data()["sample_indices"])


def read_model(save: str, rollout_id: int) -> list[list[int]]:
    """Return the samples of each step that checkpoint ``rollout_id`` was trained on."""
    model: list[list[int]] = json.loads((Path(save) / f"model_{rollout_id}.json").read_text())
    return model


def append(folder: str, name: str, record: dict[str, Any]) -> None:
    """Append one line to a log, in one piece."""
    file = os.open(Path(folder) / f"{name}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, (json.dumps(record) + "\n").encode())
    os.close(file)


def log_samples(rollout_id: int, args: Any, samples: list[Sample], metrics: Any, seconds: float) -> bool:
    """``--custom-rollout-log-function-path``: every sample that a rollout gave, as far as a test looks at it."""
    for sample in samples:
        names = ("index", "group_index", "prompt", "tokens", "response_length", "rollout_log_probs", "loss_mask")
        record = {name: getattr(sample, name) for name in names}
        spans = [[span["version"], span["start"], span["end"]] for span in sample.weight_version_spans]
        append(args.test_folder, "samples", {"rollout": rollout_id, **record, "spans": spans})
    return True


def drops(group_index: int) -> bool:
    """Return True for the groups that the dynamic filter drops, whatever was generated."""
    return group_index % 5 == 2


def keep(args: Any, group: Any, **_: Any) -> DynamicFilterOutput:
    """``--dynamic-sampling-filter-path``."""
    against = drops(next(iter_samples(group)).group_index)
    return DynamicFilterOutput(keep=not against, reason="chosen" if against else None)


async def fan_out(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """``--custom-generate-function-path`` that makes two samples of one in every second group."""
    sample = await sglang_rollout.generate(args, sample, sampling_params)
    if sample.status == Sample.Status.ABORTED or not fans_out(sample.group_index or 0):
        return [sample]
    twin = copy_sample(sample)
    sample.rollout_id = twin.rollout_id = sample.index
    return [sample, twin]


def fans_out(group_index: int) -> bool:
    return group_index % 2 == 0


def run(changes: dict[str, Any]) -> None:
    """Start or resume the run, and take it to its end or to where it kills itself."""
    overlap = changes.pop("overlap")
    point, nth = changes.pop("kill_at", None) or (None, 0)
    journal_writer.SYNC_INTERVAL_S = 0.1  # these runs are over in a second or two
    if point is not None:
        durable_points.POINTS[point](nth)
    base: dict[str, Any] = {
        "advantage_estimator": "grpo", "balance_by_flops": False, "balance_data": False,
        "check_weight_update_equal": False,
        "custom_convert_samples_to_train_data_path": None, "custom_eval_rollout_log_function_path": None,
        "custom_engine_scaling_path": None,
        "custom_reward_post_process_path": None,
        "custom_rollout_log_function_path": "tests.support.durable_driver.log_samples",
        "data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer", "debug_rollout_only": False,
        "debug_train_only": True, "dump_details": None, "eval_interval": None,
        "grpo_std_normalization": False, "load_debug_rollout_data": None, "log_reward_category": None,
        "micro_batch_size": 1, "offload_rollout": False, "offload_train": False,
        "ref_load": None,  # part of what must be unchanged for a journal to be used; else a new directory per process
        "release_train": False,
        "rewards_normalization": True, "use_critic": False,
        "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout", "rollout_num_gpus": 1,
        "eval_function_path": "slime.rollout.sglang_rollout.generate_rollout", "save_debug_rollout_data": None,
        "skip_eval_before_train": True, "update_weights_interval": 1, "use_dynamic_batch_size": False,
        "wandb_always_use_train_step": False, "custom_rm_path": "tests.support.durable_driver.reward",
    }  # fmt: skip
    test_folder = changes.pop("test_folder")
    args: Any = rollout_args(**{**base, **changes})
    args.device_type, args.test_folder = "cpu", test_folder
    for module in (sglang_rollout, data_source):
        module.load_tokenizer = lambda *a, **k: CharTokenizer()  # type: ignore[attr-defined]
    rollout_manager.worker.begin = lambda args, name: Path(os.devnull)  # type: ignore[assignment]
    rollout_manager.ray = SimpleNamespace(put=lambda shard: shard)  # type: ignore[assignment]
    init_http_client(args)
    manager = RolloutManager(args)
    manager.setup((None, [], []), {})
    manager.set_train_parallel_config(
        {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    )
    trainer = CountingTrainer(args)
    args.start_rollout_id = trainer.last + 1
    manager.load(trainer.last)
    append(test_folder, "resumed", {"groups": len(manager.data_source._recovery.groups)})
    Loop(args, Rollout(manager), trainer, manager.get_num_rollout_per_epoch(), overlap=overlap).run()  # type: ignore[arg-type]


async def reward(args: Any, sample: Any, **_: Any) -> Any:
    """``--custom-rm-path``, for a sample and for the list of a fan-out."""
    if isinstance(sample, list):
        return [float(one.index % 2) for one in sample]
    return float(sample.index % 2)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    run(json.loads(sys.argv[1]))
    os._exit(0)
