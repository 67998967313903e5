"""The loop: generate -> train -> sync weights.

The synchronous schedule and the one that overlaps generation with training share every step; they differ only in when
the next rollout starts. ``train`` surrounds the loop with a start and an end that leaves no process behind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from slime.arguments.args import Args
from slime.arguments.errors import ArgumentError
from slime.arguments.rules import model_defaults
from slime.arguments.rules.checkpoints import first_weights, refuse_checkpoints_since
from slime.arguments.rules.loop import generates_always, refuse_impossible_loop
from slime.observability import run_dir
from slime.observability.logging_utils import finish_tracking, init_tracking, log
from slime.observability.progress import Starting
from slime.observability.timer import get_timers, timer
from slime.observability.tracking import rollout_step
from slime.preflight.look.start import look
from slime.preflight.plan.memory_text import warning_of_this_machine
from slime.ray import cluster, directories, space
from slime.ray.driver.critic import CriticGroup, CriticStep
from slime.ray.driver.placement_group import (
    create_placement_groups,
    create_rollout_manager,
    create_training_models,
    launch_training_models,
)
from slime.ray.driver.program import handle_sigterm, run_as_program
from slime.ray.driver.rollout_handle import RolloutHandle
from slime.ray.driver.serving import serve
from slime.ray.manager.rollout_metrics import headline
from slime.utils.misc import should_run_periodic_action
from slime.utils.run_state import record

logger = logging.getLogger(__name__)


class Rollout(Protocol):
    """The part of the rollout side that the loop uses (``slime.ray.driver.rollout_handle.RolloutHandle``)."""

    def start_generate(self, rollout_id: int) -> Any: ...
    def wait_generate(self, started: object, rollout_id: int) -> Any: ...
    def eval(self, rollout_id: int) -> None: ...
    def save(self, rollout_id: int) -> None: ...
    def offload(self) -> None: ...
    def onload_weights(self) -> None: ...
    def onload_kv(self) -> None: ...
    def check_weights(self, action: str) -> Any: ...
    def check_equal_checksums(self) -> None: ...
    def check_canary(self, expected: Sequence[float]) -> None: ...
    def weights_updated(self, version: int, step: int) -> None: ...


class Trainer(Protocol):
    """The part of the trainers that the loop uses (``slime.ray.driver.train_group.RayTrainGroup``)."""

    @property
    def canary(self) -> Sequence[float] | None: ...
    def async_train(
        self, rollout_id: int, rollout_data_ref: Sequence[Any], external_data: Sequence[Any] | None = None
    ) -> list[Any]: ...
    def wait(self, refs: list[Any], what: str) -> list[Any]: ...
    def save_model(self, rollout_id: int, force_sync: bool = False, keep: bool = True) -> None: ...
    def update_weights(self, synchronous_loop: bool = True) -> int | None: ...
    def offload(self) -> None: ...
    def onload(self) -> None: ...
    def clear_memory(self) -> None: ...
    def release(self) -> None: ...
    def restart(self, rollout_id: int) -> None: ...
    def finish(self) -> None: ...


class Loop:
    """The steps of a run, and the two orders in which they are taken.

    ``trainer`` is None under ``--debug-rollout-only``. ``rollouts_per_epoch`` places saves and evaluations at epoch
    ends. With ``--offload-train`` the trainer starts offloaded; so does a ``critic``, and they are onloaded in turns.
    """

    def __init__(
        self,
        args: Args,
        rollout: Rollout,
        trainer: Trainer | None,
        rollouts_per_epoch: int | None,
        *,
        overlap: bool,
        critic: CriticGroup | None = None,
    ) -> None:
        self.args, self.rollout, self.trainer = args, rollout, trainer
        self.critic = None if critic is None else CriticStep(args, critic, rollout.save)
        self._trainer_offloaded = trainer is not None and args.offload_train
        self.rollouts_per_epoch = rollouts_per_epoch
        self.overlap = overlap
        self.mixes_versions = generates_always(args)
        self._trained: dict[str, float] = {}
        self._trained_step: int | None = None

    def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Take the trained weights to the engines, call ``started``; then one rollout after the other to the last."""
        args = self.args
        self.first_sync()
        started()
        if args.num_rollout == 0:
            self.evaluate(0)
        elif args.start_rollout_id >= args.num_rollout:
            logger.warning(
                "nothing to do: the run starts at rollout %d and --num-rollout is %d",
                args.start_rollout_id,
                args.num_rollout,
            )
        schedule = self._run_one_step_off_policy if self.overlap else self._run_sync
        schedule(range(args.start_rollout_id, args.num_rollout))
        if self.critic is not None:
            self.critic.critic.finish()
        if self.trainer is not None:
            self.trainer.finish()

    def _run_sync(self, rollout_ids: range) -> None:
        for rollout_id in rollout_ids:
            if rollout_id == 0 and not self.args.skip_eval_before_train:
                self.evaluate(0)
            data = self.generate(rollout_id)
            if self.trainer is not None:
                self.give_devices_to_trainer()
                self.train(rollout_id, data)
                self.save(rollout_id)
                self.give_devices_to_engines()
                self.sync_weights(rollout_id + 1)
            self.evaluate_periodically(rollout_id)
            self.report(rollout_id)

    def _run_one_step_off_policy(self, rollout_ids: range) -> None:
        """While rollout N is trained on, rollout N + 1 is generated with the weights of before.

        A rollout function that always generates is not waited for: its requests continue through weight syncs.
        """
        started = self.rollout.start_generate(rollout_ids[0]) if rollout_ids else None
        for rollout_id in rollout_ids:
            data = self.wait_generate(started, rollout_id)
            upcoming = rollout_id + 1 if rollout_id + 1 in rollout_ids else None
            started = None if upcoming is None else self.rollout.start_generate(upcoming)
            if self.trainer is not None:
                self.train(rollout_id, data)
                self.save(rollout_id)
                if self.critic is not None:
                    self._offload_trainer()
                if self._syncs_after(rollout_id):
                    if upcoming is not None and not self.mixes_versions:
                        self.wait_generate(started, upcoming)
                    self.sync_weights(rollout_id + 1)
            self.evaluate_periodically(rollout_id)
            self.report(rollout_id)

    # The steps

    def generate(self, rollout_id: int) -> Any:
        """Return the training data of a rollout that starts now."""
        return self.wait_generate(self.rollout.start_generate(rollout_id), rollout_id)

    def wait_generate(self, started: object, rollout_id: int) -> Any:
        """Return the training data of a rollout that has been started; again when it has been waited for already."""
        with timer("generate"):
            return self.rollout.wait_generate(started, rollout_id)

    def train(self, rollout_id: int, data: Sequence[Any]) -> None:
        """Train every rank on its share of the rollout: the critic first, whose values the actor needs.

        With ``--release-train`` the trainer is started for it.
        """
        assert self.trainer is not None
        if self.args.release_train:
            with timer("start_train"):
                self.trainer.restart(rollout_id)
        with timer("train"):
            values, ranks = None, []
            if self.critic is not None:
                due = self._due(rollout_id, self.args.save_interval, at_the_end=True)
                values = self.critic.run(rollout_id, data, save=due)
            if self._trains_actor(rollout_id):
                self._onload_trainer()
                refs = self.trainer.async_train(rollout_id, data, values)
                ranks = self.trainer.wait(refs, f"training on rollout {rollout_id}")
        self._trained = headline(ranks) | (self.critic.headline(rollout_id) if self.critic is not None else {})
        self._trained_step = rollout_id + 1

    def _trains_actor(self, rollout_id: int) -> bool:
        return self.critic is None or not self.critic.critic_only(rollout_id)

    def save(self, rollout_id: int) -> None:
        """Save where it is due: first the prompts' state, then the checkpoint, whose tracker file makes both count.

        Released trainers restart from it, so that it is always due then; one that ``--save-interval`` does not ask for
        is removed once there is a later one.
        """
        assert self.trainer is not None
        due = self._due(rollout_id, self.args.save_interval, at_the_end=True) and self._trains_actor(rollout_id)
        parts = self.args.release_train and self._syncs_after(rollout_id)
        if not due and not parts:
            return
        with timer("save"):
            self.rollout.save(rollout_id)
            whole = parts or rollout_id == self.args.num_rollout - 1
            self.trainer.save_model(rollout_id, force_sync=whole, **({} if due else {"keep": False}))

    def _syncs_after(self, rollout_id: int) -> bool:
        return not self.overlap or (rollout_id + 1) % self.args.update_weights_interval == 0

    def first_sync(self) -> None:
        """Take the trainer's weights, loaded or resumed, to the engines before anything is generated."""
        if self.trainer is None:
            return
        if self.args.debug_train_only:
            return
        if self.args.offload_rollout and not self.args.release_train:
            self.rollout.onload_weights()
        self.sync_weights(self.args.start_rollout_id)
        if self.args.check_weight_update_equal and self.args.start_rollout_id == 0:
            # Engines and trainer have loaded the same checkpoint; a resumed trainer is ahead of the engines' snapshot.
            self.rollout.check_weights("compare")
        if self.trainer.canary is not None:
            self.rollout.check_canary(self.trainer.canary)

    def sync_weights(self, step: int) -> None:
        """Push the trainer's weights, those after rollout ``step - 1``, to the engines.

        With ``--check-weight-update-equal`` all must hold the same afterwards. With ``--release-train`` the trainers
        end in between: when they have written the weights, and before engines take memory.
        """
        assert self.trainer is not None
        if self.args.debug_train_only:
            if self.args.keep_old_actor:  # no weights go anywhere, but they count as synced
                self.trainer.update_weights(synchronous_loop=not self.overlap)
            if self.args.release_train:
                self.trainer.release()
            return
        with timer("sync_weights"):
            version = self.trainer.update_weights(synchronous_loop=not self.overlap)
            if version is not None:
                self.rollout.weights_updated(version, step)
        if self.args.check_weight_update_equal:
            self.rollout.check_equal_checksums()
        if self.args.offload_rollout:
            with timer("onload_rollout"):
                self.rollout.onload_kv()

    def supply_weights(self) -> None:
        """In the middle of a rollout that has lost every engine: push the weights to the restarted ones."""
        if self.trainer is not None:
            self.sync_weights(self.args.start_rollout_id if self._trained_step is None else self._trained_step)

    def give_devices_to_trainer(self) -> None:
        """Offload the engines and onload the trainer, where they take turns."""
        assert self.trainer is not None
        if self.args.offload_rollout and not self.args.debug_train_only:
            with timer("offload_rollout"):
                self.rollout.offload()
        if self.critic is None:
            self._onload_trainer()

    def give_devices_to_engines(self) -> None:
        """Offload the trainer and onload the engines' memory for weights, where they take turns."""
        assert self.trainer is not None
        if self.args.offload_train:
            self._offload_trainer()
        elif self.args.device_type != "cpu":
            with timer("clear_memory"):
                self.trainer.clear_memory()
        if self.args.offload_rollout and not self.args.debug_train_only and not self.args.release_train:
            with timer("onload_rollout"):
                self.rollout.onload_weights()

    def _offload_trainer(self) -> None:
        if self.trainer is not None and not self._trainer_offloaded:
            with timer("offload_train"):
                self.trainer.offload()
            self._trainer_offloaded = True

    def _onload_trainer(self) -> None:
        if self.trainer is not None and self._trainer_offloaded:
            with timer("onload_train"):
                self.trainer.onload()
            self._trainer_offloaded = False

    def evaluate_periodically(self, rollout_id: int) -> None:
        """Evaluate after a rollout where ``--eval-interval`` or the end of an epoch asks for it."""
        if self._due(rollout_id, self.args.eval_interval, at_the_end=False):
            self.evaluate(rollout_id)

    def evaluate(self, rollout_id: int) -> None:
        """Evaluate the engines' present weights, when there are evaluation data sets."""
        if self.args.eval_interval is not None:
            with timer("eval"):
                self.rollout.eval(rollout_id)

    def report(self, rollout_id: int) -> None:
        """Write and show the seconds of each stage of this step, as seen from here."""
        seconds = get_timers().drain("perf/stage/")
        if seconds:
            log(self.args, seconds | {"rollout/step": rollout_step(self.args, rollout_id)}, "rollout/step")
        results = ", ".join(f"{name} {value:.4g}" for name, value in self._trained.items())
        stages = ", ".join(f"{name.split('/')[-1].removesuffix('_time')} {t:.2f} s" for name, t in seconds.items())
        logger.info("rollout %d of %d: %s (%s)", rollout_id, self.args.num_rollout, results or "generated", stages)

    def _due(self, rollout_id: int, interval: int | None, *, at_the_end: bool) -> bool:
        last = self.args.num_rollout if at_the_end else None
        return should_run_periodic_action(rollout_id, interval, self.rollouts_per_epoch, last)


def train(args: Args, *, overlap: bool = False) -> None:
    """Start everything, run the loop, and end everything. For ``overlap`` see ``Loop``.

    Raises ArgumentError, before anything is started, for flags that the schedule cannot follow, and for prompts and
    hooks that would end the run. With ``--debug-rollout-only`` and nothing to generate the engines serve instead.
    """
    if args.serve_only:
        serve(args)
    refuse_impossible_loop(args, overlap=overlap)
    # Errors that would end the run later are raised before anything starts.
    logger.info("looking at prompts and hooks (--skip-first-look: not)")
    found = look(args)
    for sentence in [*found.warnings, *found.unchecked, warning_of_this_machine(args)]:
        if sentence:
            logger.warning("%s", sentence)
    if found.errors:
        raise ArgumentError("\n".join(found.errors))
    start = Starting()
    rollout: RolloutHandle | None = None
    finished = False
    directories.hold(args)
    try:
        _open(args)
        record(args, generates_while_training=overlap)
        start.waits_for("Ray, and the slots of the run")
        groups = create_placement_groups(args)
        handle_sigterm()  # Ray has put its own handler there
        init_tracking(args, primary=True)
        start.waits_for("the rollout manager, which loads prompts and hooks; engines start meanwhile")
        # With --num-epoch alone the trainers' schedules wait for the manager, which counts the prompts.
        launched = None if args.num_rollout is None else launch_training_models(args, groups)
        manager, per_epoch = create_rollout_manager(args, groups["rollout"])
        rollout = RolloutHandle(args, manager)
        if not args.debug_rollout_only:
            start.waits_for("the trainers, which load the first weights")
        trainer, critic = create_training_models(args, groups, manager, launched=launched)
        if trainer is not None and critic is not None:
            rollout.liveness = [trainer.liveness(), critic.liveness()]
        if not args.debug_train_only:
            start.waits_for("the engines and their router")
        rollout.wait_ready()
        loop = Loop(args, rollout, trainer, per_epoch, overlap=overlap, critic=critic)
        rollout.supply_weights = loop.supply_weights
        if not args.debug_train_only and trainer is not None:
            start.waits_for("the trainer's weights on their way to the engines")
        loop.run(start.done)
        finished = True
    finally:
        _end(rollout, gently=finished)


def _open(args: Args) -> None:
    """Make the run directory; log what the run is and what space it has."""
    refuse_checkpoints_since(args)
    run_dir.prepare(args)
    space.look(args)
    logger.info("run directory: %s", args.run_dir)
    for what, words in model_defaults.summary(args):
        logger.info("model, %s: %s", what, words)
    if not args.debug_rollout_only:
        logger.info("first weights: %s", first_weights(args))


def _end(rollout: RolloutHandle | None, *, gently: bool) -> None:
    """End every process of the run, in any state of it. A second Ctrl-C skips the grace period."""
    try:
        try:
            if rollout is not None and gently:
                rollout.dispose()
        finally:
            finish_tracking(complete=gently)
    finally:
        if cluster.is_connected():
            cluster.current().shutdown()
        directories.release()


def run(args: Args, *, overlap: bool = False) -> int:
    """Run ``train`` as a program does; return its exit code."""
    return run_as_program(args, lambda: train(args, overlap=overlap))
