"""What ``create_rollout_manager`` returns: a pair to today's training loops, the manager itself to older ones."""

from __future__ import annotations

from typing import Any


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


def handle_of(rollout_manager: Any) -> Any:
    """Return the actor handle of what ``create_rollout_manager`` returned, unpacked or not."""
    return rollout_manager[0] if isinstance(rollout_manager, ManagerAndEpoch) else rollout_manager
