"""The rollout manager: prompts in, one shard of training data per data-parallel rank out."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray

from slime.arguments.args import Args
from slime.backends.megatron_utils.checkpoints.directory import check_rollout_files
from slime.batching.columns import RolloutShard
from slime.observability import tracking
from slime.observability.logging_utils import log
from slime.observability.samples import write as write_samples
from slime.observability.tracking import rollout_step
from slime.ray.actors import worker
from slime.ray.manager.conversion import (
    Converter,
    carried_over_path,
    load_dump,
    read_carried_over,
    save_dump,
    write_carried_over,
)
from slime.ray.manager.engines.control import EngineControl, forwarded
from slime.ray.manager.engines.fleet import EngineFleet
from slime.ray.manager.posters import Posters
from slime.ray.manager.rollout_metrics import (
    ConstantRewards,
    asked_for_metrics,
    eval_metrics,
    eval_summary,
    request_metrics,
    rollout_metrics,
    staleness_metrics,
    top_p_metrics,
)
from slime.ray.remote import EngineDied, reports_errors
from slime.rollout import sglang_rollout
from slime.rollout.base_types import call_rollout_fn, check_sibling_rollout_ids
from slime.rollout.data_source import SNAPSHOTS_KEPT
from slime.rollout.debug_data import save_tokenizer
from slime.rollout.durable.recovery import may_be_saved
from slime.rollout.hooks.hook import check_hooks, find_hook, make_hook, with_notes
from slime.rollout.requests.images import complete
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.rollout.staleness import weight_clock
from slime.servers.http_utils import get_http_client, init_http_client
from slime.servers.key_file import key_for
from slime.utils import run_key
from slime.utils.misc import Box, load_function
from slime.utils.run_state import record
from slime.utils.types import Sample, iter_samples

logger = logging.getLogger(__name__)


class RolloutManager:
    """A Ray actor whose methods run on their own threads: saving does not wait for a rollout in progress.

    Rollouts and evaluations exclude each other. A rollout survives the loss of engines. When the last one is lost for
    good, or the router is, the rollout in progress and every later one raise ``EngineDied``, and so does
    ``wait_for_failure``, on which the driver waits beside everything else.
    """

    def __init__(self, args: Args) -> None:
        worker.begin(args, "rollout_manager")
        self.args = args
        self._generating = threading.Lock()
        """Held by the rollout or the evaluation in progress."""
        self.engines = EngineControl(args, self._generating)
        self._carried_snapshots: dict[int, bytes | None] = {}
        self._constant_rewards = ConstantRewards(args)

    def take_secrets(self, secrets: Mapping[str, str]) -> None:
        """Add to this process's environment what users' functions may need and no other process of the run has.

        It is not in the environment that the process was started with, which tools show.
        """
        os.environ.update(secrets)

    @reports_errors
    def setup(self, pg: tuple[Any, list[int], list[int]], wiring: dict[str, Any]) -> None:
        """Start the engines on the slots ``pg`` in the background; load prompts and hooks."""
        args = self.args
        run_key.install()
        if args.rollout_buffer_url:
            run_key.add(args.rollout_buffer_url, key_for(args.rollout_buffer_url))
        check_hooks(args)
        if not args.debug_train_only:
            self.engines.fleet = EngineFleet(args, pg, wiring, self.engines)
            threading.Thread(target=self._start_engines, args=(wiring,), name="engine-starter", daemon=True).start()
        self.data_source = make_hook(args.data_source_path, "data_source_path")(args)
        self._make_rollout = _rollout_function(args, "rollout_function_path")
        self.generate_rollout = load_function(args.rollout_function_path)
        if hasattr(self.data_source, "unconsumed"):
            self.data_source.unconsumed = getattr(self.generate_rollout, "unconsumed", None)
        self._make_evaluation = _rollout_function(args, "eval_function_path")
        self._log_rollout = find_hook(args, "custom_rollout_log_function_path")
        self._log_eval = find_hook(args, "custom_eval_rollout_log_function_path")
        self.converter = Converter(args)
        if args.dump_details:
            save_tokenizer(args)
        worker.gc_freeze()

    # What the driver calls

    @reports_errors
    def generate(self, rollout_id: int) -> list[Box] | None:
        """Make the training data of one rollout; return a boxed reference per data-parallel rank.

        None under ``--debug-rollout-only``.
        """
        with self._generating:
            set_current_rollout_id(rollout_id)
            worker.collect_between_rollouts()
            started = time.monotonic()
            samples, metrics = self._samples(rollout_id)
            if not samples:
                raise ValueError(f"rollout {rollout_id} holds no sample; check the rollout function and its filters")
            seconds = time.monotonic() - started
            if self.args.save_debug_rollout_data:
                save_dump(self.args, rollout_id, samples)
            write_samples(self.args, rollout_id, samples)
            self._constant_rewards.check(rollout_id, samples)
            self._report(rollout_id, samples, metrics, seconds)
            boxes = None
            if not self.args.debug_rollout_only:
                boxes = [Box(self._put(shard)) for shard in self.converter.shards(samples)]
            self._snapshot(rollout_id)
            return boxes

    def _put(self, shard: RolloutShard) -> ray.ObjectRef:
        """Put the train data of a data-parallel rank where its trainers ``ray.get`` it."""
        if self.args.rollout_data_transport == "object-store":
            return ray.put(shard)
        import torch  # managers of the other transport start without it

        # NIXL takes no memory of no size.
        tensors = shard.with_values(lambda values: torch.from_numpy(values) if values.size else values)
        return ray.put(tensors, _tensor_transport="nixl")

    @reports_errors
    def eval(self, rollout_id: int) -> list[str]:
        """Evaluate on every evaluation data set and log the result; return a line about each."""
        if self.args.debug_train_only:
            return []
        with self._generating:
            set_current_rollout_id(rollout_id)
            self.engines.wait_until_ready()
            self.engines.health_monitoring_resume()
            output: Any = call_rollout_fn(
                self._make_evaluation, self.args, rollout_id, self.data_source, evaluation=True
            )
            if self.args.save_debug_rollout_data:
                everything = [s for result in output.data.values() for s in iter_samples(result.get("samples") or [])]
                save_dump(self.args, f"eval_{rollout_id}", everything)
            write_samples(self.args, rollout_id, output.data, evaluation=True)
            if self._log_eval is None or not self._log_eval(rollout_id, self.args, output.data, output.metrics):
                self._log(rollout_id, eval_metrics(self.args, output.data) | (output.metrics or {}), "eval/step")
            return eval_summary(output.data)

    @reports_errors
    def save(self, rollout_id: int) -> None:
        """Save the state as it was at the end of rollout ``rollout_id``, also while a later one runs.

        That is the place in the prompts, except under ``--disable-rollout-global-dataset``, and what was carried over.
        """
        if self.args.rollout_global_dataset:
            # A data source without snapshots is at least not saved in the middle of a rollout.
            with contextlib.nullcontext() if hasattr(self.data_source, "snapshot") else self._generating:
                self.data_source.save(rollout_id)
        known = rollout_id in self._carried_snapshots
        carried = self._carried_snapshots[rollout_id] if known else self.converter.state()
        assert self.args.save is not None, "nothing is saved without --save"
        write_carried_over(carried_over_path(self.args.save, rollout_id), carried)

    @reports_errors
    def load(self, rollout_id: int | None = None, root: str | None = None) -> None:
        """Restore what ``save(rollout_id)`` saved under ``root`` (``--load``); a run that starts at 0 has nothing."""
        if root is not None:
            record(self.args, load=root)
        if self.args.load and rollout_id is not None and rollout_id >= 0:
            check_rollout_files(self.args.load, rollout_id, prompts=self.args.rollout_global_dataset)
        if self.args.rollout_global_dataset:
            self.data_source.load(rollout_id)
        if self.args.load and rollout_id is not None and rollout_id >= 0:
            path = carried_over_path(self.args.load, rollout_id)
            self.converter.restore(read_carried_over(path))

    def get_num_rollout_per_epoch(self) -> int | None:
        """Return how many rollouts one pass over the prompts makes; None without a prompt data set."""
        if not self.args.rollout_global_dataset or not len(self.data_source):
            return None
        return int(len(self.data_source) // self.args.rollout_batch_size)

    def set_num_rollout(self, num_rollout: int) -> None:
        record(self.args, num_rollout=num_rollout)

    def set_train_parallel_config(self, config: Mapping[str, int]) -> None:
        """Set how the trainers divide the data."""
        self.converter.train_parallel_config = dict(config)

    def weights_updated(self, version: int, step: int) -> None:
        """Record that every engine holds ``version``, the weights after training on all rollouts before ``step``."""
        weight_clock().publish(version, step)

    def drain_records(self) -> list[Any]:
        """Return the metrics logged here since the last call."""
        return tracking.drain()

    def dispose(self) -> None:
        """End engines and router; before them a rollout function that always generates (its ``stop``)."""
        self.engines.end_waits()
        try:
            if stop := getattr(getattr(self, "generate_rollout", None), "stop", None):
                stop()
        finally:
            if self.engines.fleet is not None:
                self.engines.fleet.stop()

    # What the driver, trainers and commands call of the engines

    get_updatable_engines = forwarded(EngineControl.get_updatable_engines)
    get_updatable_engines_and_lock = forwarded(EngineControl.get_updatable_engines_and_lock)
    recover_updatable_engines = forwarded(EngineControl.recover_updatable_engines)
    load_weights = forwarded(EngineControl.load_weights)
    clear_updatable_num_new_engines = forwarded(EngineControl.clear_updatable_num_new_engines)
    mark_unreachable_engines_dead = forwarded(EngineControl.mark_unreachable_engines_dead)
    health_monitoring_pause = forwarded(EngineControl.health_monitoring_pause)
    health_monitoring_resume = forwarded(EngineControl.health_monitoring_resume)
    deployment = forwarded(EngineControl.deployment)
    add_engines = forwarded(EngineControl.add_engines)
    drain_engines = forwarded(EngineControl.drain_engines)
    remove_engines = forwarded(EngineControl.remove_engines)
    offload = forwarded(EngineControl.offload)
    onload = forwarded(EngineControl.onload)
    onload_weights = forwarded(EngineControl.onload_weights)
    onload_kv = forwarded(EngineControl.onload_kv)
    check_weights = forwarded(EngineControl.check_weights)
    ask_canary = forwarded(EngineControl.ask_canary)
    wait_until_weights_needed = forwarded(EngineControl.wait_until_weights_needed)
    needs_weights = forwarded(EngineControl.needs_weights)
    wait_for_failure = forwarded(EngineControl.wait_for_failure)

    # Inside

    def _start_engines(self, wiring: dict[str, Any]) -> None:
        fleet = self.engines.fleet
        assert fleet is not None
        try:
            fleet.start()
            most = max(self.args.rollout_num_engines or 0, self.args.rollout_max_engines or 0)  # some may join later
            init_http_client(Args(**{**vars(self.args), "rollout_num_engines": most}))
            get_http_client().answers.report = fleet.note_rejected
            if self.args.use_distributed_post:
                Posters(self.args, get_http_client(), wiring)
        except Exception as e:
            logger.exception("the engines did not start")
            self.engines.engines_failed(EngineDied(str(e)))
        finally:
            self.engines.ready.set()

    def _samples(self, rollout_id: int) -> tuple[list[Sample], dict[str, Any] | None]:
        """Return the flat samples of a rollout, generated or replayed, and the rollout function's metrics."""
        if self.args.load_debug_rollout_data:
            return load_dump(self.args, rollout_id), None
        self.engines.wait_until_ready()
        self.engines.health_monitoring_resume()
        output: Any = call_rollout_fn(self._make_rollout, self.args, rollout_id, self.data_source, evaluation=False)
        with self.converter.annotate_with_hooks():
            check_sibling_rollout_ids(output.samples)
        samples = list(iter_samples(output.samples))
        complete(samples, lambda: sglang_rollout.GenerateState(self.args))
        if hasattr(self.data_source, "record_consumed"):
            self.data_source.record_consumed(rollout_id, samples)
        return samples, output.metrics

    def _report(self, rollout_id: int, samples: list[Sample], metrics: dict[str, Any] | None, seconds: float) -> None:
        if asked_for := asked_for_metrics(self.args, samples):
            self._log(rollout_id, asked_for, "rollout/step")
        if self.args.load_debug_rollout_data:
            return
        if self._log_rollout is not None and self._log_rollout(rollout_id, self.args, samples, metrics, seconds):
            return
        measured = rollout_metrics(self.args, samples, seconds) | request_metrics(samples) | top_p_metrics(samples)
        fleet = self.engines.fleet
        measured |= staleness_metrics(samples, rollout_id) | (fleet.counts() if fleet is not None else {})
        if self.args.debug_rollout_only:
            measured |= self._as_trained_on(rollout_id, samples)
        self._log(rollout_id, measured | (metrics or {}), "rollout/step")

    def _as_trained_on(self, rollout_id: int, samples: list[Sample]) -> dict[str, float]:
        """Return the metrics that a trainer would report of its data before its first pass."""
        from slime.backends.megatron_utils.train.train_metrics import train_data_metrics  # it needs torch

        try:
            return train_data_metrics(self.args, self.converter.whole(samples).to_tensors())
        except Exception as e:  # noqa: BLE001  (hooks of the user's may raise anything, and nothing is to be trained)
            logger.warning(
                "rollout %d could not be trained on, rewards are not reported: %s", rollout_id, with_notes(e)
            )
            return {}

    def _log(self, rollout_id: int, metrics: dict[str, Any], step_key: str) -> None:
        logger.info("rollout %d: %s", rollout_id, metrics)
        log(self.args, metrics | {step_key: rollout_step(self.args, rollout_id)}, step_key)

    def _snapshot(self, rollout_id: int) -> None:
        """Remember the state that ``save(rollout_id)`` is to write, before a later rollout changes it."""
        if not self.args.save:
            return
        if hasattr(self.data_source, "snapshot"):
            self.data_source.snapshot(rollout_id)
        if not may_be_saved(self.args, rollout_id, self.get_num_rollout_per_epoch() or 0):
            return
        self._carried_snapshots[rollout_id] = self.converter.state()
        for old in itertools.islice(
            sorted(self._carried_snapshots), max(0, len(self._carried_snapshots) - SNAPSHOTS_KEPT)
        ):
            del self._carried_snapshots[old]


def _rollout_function(args: Args, name: str) -> Callable[..., Any]:
    """Return the function that makes rollouts; errors are attributed to a user's function, not to a built-in one."""
    hook = make_hook(getattr(args, name), name)
    return hook.function if hook.path.startswith("slime.") else hook
