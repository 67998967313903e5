"""The driver's side of the rollout manager: calls that wait with a name and a deadline, and take metrics in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from slime.arguments.args import Args
from slime.arguments.rules.data import BUILT_IN_SOURCES
from slime.observability import tracking
from slime.ray.manager.engines import canary
from slime.ray.remote import DAY_S, EnginesNeedWeights, LivenessMonitor, Peer, wait_one

if TYPE_CHECKING:
    from slime.ray.remote import RemoteActor

logger = logging.getLogger(__name__)

SAVE_DEADLINE_S = 900.0
DISPOSE_DEADLINE_S = 45.0
CONTROL_DEADLINE_S = 900.0


class RolloutHandle:
    """Calls to the rollout manager ``manager``. Every wait ends with ``EngineDied`` when no engine is left.

    ``supply_weights`` is called while a rollout or an evaluation is waited for that has lost every engine, and whose
    new ones wait for weights (``--use-fault-tolerance``).
    """

    def __init__(self, args: Args, manager: RemoteActor) -> None:
        self.args, self.manager = args, manager
        self.supply_weights: Callable[[], None] | None = None
        self._weights_needed: Any = None
        self._peer = Peer("the rollout manager", Path(args.run_dir) / "logs" / "rollout_manager.log")
        self._watch = [manager.wait_for_failure.remote()]
        self.liveness: list[LivenessMonitor] = []
        """Liveness of the trainers; the end of one of them ends every wait here."""

    def start_generate(self, rollout_id: int) -> Any:
        """Start a rollout; return the reference that ``wait_generate`` waits for."""
        return self.manager.generate.remote(rollout_id)

    def wait_generate(self, started: object, rollout_id: int) -> Any:
        """Return the training data of a started rollout: a boxed reference per data-parallel rank, or None."""
        return self._wait_generating(started, f"generating rollout {rollout_id}")

    def eval(self, rollout_id: int) -> None:
        """Evaluate and log the results; its metrics are written when this returns."""
        lines = self._wait_generating(self.manager.eval.remote(rollout_id), f"evaluating after rollout {rollout_id}")
        for line in lines or []:
            logger.info("evaluation at rollout %d: %s", rollout_id, line)

    def save(self, rollout_id: int) -> None:
        """Save the state of the prompts as of rollout ``rollout_id``.

        A data source of the user's may have to wait for the rollout that is being generated, however long that takes.
        """
        saving, what = self.manager.save.remote(rollout_id), f"saving the prompts' state of rollout {rollout_id}"
        if self.args.data_source_path.startswith(BUILT_IN_SOURCES):
            self._wait(saving, what, SAVE_DEADLINE_S)
        else:
            self._wait_generating(saving, what)

    def offload(self) -> None:
        """Release the engines' memory."""
        self._wait(self.manager.offload.remote(), "offloading the engines", CONTROL_DEADLINE_S)

    def onload_weights(self) -> None:
        """Reallocate the engines' memory for weights."""
        self._wait(self.manager.onload_weights.remote(), "onloading the engines' weights", CONTROL_DEADLINE_S)

    def onload_kv(self) -> None:
        """Reallocate the engines' memory for generation."""
        self._wait(self.manager.onload_kv.remote(), "onloading the engines' caches", CONTROL_DEADLINE_S)

    def weights_updated(self, version: int, step: int) -> None:
        """Report that every engine holds ``version``, the weights after training on all rollouts before ``step``."""
        self._wait(
            self.manager.weights_updated.remote(version, step), "reporting the weight version", CONTROL_DEADLINE_S
        )

    def check_weights(self, action: str) -> Any:
        """Run an action of the engines' weight checker."""
        return self._wait(self.manager.check_weights.remote(action), f"weight check {action!r}", CONTROL_DEADLINE_S)

    def check_equal_checksums(self) -> None:
        """Raise RuntimeError unless all engines that share weights in the same way hold the same ones."""
        found = self.check_weights("checksum")
        first: dict[str, Any] = {}
        for entry in found:
            layout = str([rank.get("parallelism_info") for rank in entry.get("ranks", ())])
            if first.setdefault(layout, entry) != entry:
                raise RuntimeError(f"after a weight sync the engines hold different weights; their checksums: {found}")

    def check_canary(self, expected: Sequence[float]) -> None:
        """Compare the engines' log-probs of a fixed prompt with the trainer's; see ``canary.compare``."""
        found = self._wait(self.manager.ask_canary.remote(), "comparing engines and trainer", CONTROL_DEADLINE_S)
        canary.compare(self.args, expected, found)

    def prepare_engines(self) -> None:
        """Before trainers allocate memory: snapshot the weights for ``--check-weight-update-equal``, and offload."""
        self.wait_ready()
        if self.args.check_weight_update_equal:
            self.check_weights("snapshot")
            self.check_weights("reset_tensors")
        if self.args.offload_rollout:
            self.offload()

    def wait_ready(self) -> None:
        """Return when the engines generate; at once when the run has none."""
        deadline = 2 * self.args.engine_ready_timeout
        self._wait(self.manager.get_updatable_engines.remote(), "starting the engines", deadline)

    def dispose(self) -> None:
        """End engines and router. What does not end in time is ended with the run's other processes."""
        ray.wait([self.manager.dispose.remote()], timeout=DISPOSE_DEADLINE_S)

    def _wait_generating(self, ref: object, what: str) -> Any:
        if self.supply_weights is None or not self.args.use_fault_tolerance:
            return self._wait(ref, what, DAY_S)
        while True:
            if self._weights_needed is None:
                self._weights_needed = self.manager.wait_until_weights_needed.remote()
            try:
                return self._wait(ref, what, DAY_S, [self._weights_needed])
            except EnginesNeedWeights as e:
                logger.warning("%s: %s", what, e)
                self._weights_needed = None
                # Unless the weight sync after a rollout has come first.
                if self._wait(self.manager.needs_weights.remote(), "asking for the engines", CONTROL_DEADLINE_S):
                    self.supply_weights()

    def _wait(self, ref: object, what: str, deadline_s: float, watch: Sequence[Any] = ()) -> Any:
        result = wait_one(ref, self._peer, what, deadline_s, [*watch, *self._watch], self.liveness)
        tracking.ingest(
            wait_one(self.manager.drain_records.remote(), self._peer, "collecting metrics", SAVE_DEADLINE_S)
        )
        return result


class ManagerAndEpoch(tuple[Any, "int | None"]):
    """``(manager, rollouts per epoch)``. Loops of slime 0.1 do not unpack it but call the manager through it."""

    @property
    def controller(self) -> Any:
        """The handle of the rollout manager."""
        return self[0]

    data_buffer = controller

    def async_generate(self, rollout_id: int) -> Any:
        return self[0].generate.remote(rollout_id)

    def async_eval(self, rollout_id: int) -> Any:
        return self[0].eval.remote(rollout_id)

    def async_offload(self) -> Any:
        return self[0].offload.remote()

    def async_onload(self, tags: list[str] | None = None) -> Any:
        return self[0].onload.remote(tags)

    def __getattr__(self, name: str) -> Any:
        return getattr(self[0], name)


def handle_of(rollout_manager: RemoteActor | ManagerAndEpoch) -> Any:
    """Return the actor handle of what ``create_rollout_manager`` returned, unpacked or not."""
    return rollout_manager[0] if isinstance(rollout_manager, ManagerAndEpoch) else rollout_manager
