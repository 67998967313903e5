"""What an accelerator has to offer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Accelerator(ABC):
    """One kind of device. Subclass it and hand a factory to ``register_accelerator`` to add a kind."""

    device_type: str
    communication_backend: str

    @abstractmethod
    def is_available(self) -> bool:
        """Return whether this process can use such a device."""

    @abstractmethod
    def current_device(self) -> Any:
        """Return the current ``torch.device``."""

    @abstractmethod
    def set_device(self, index: int) -> None:
        """Make device ``index`` the current one."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all queued work."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Release cached memory."""

    @abstractmethod
    def memory_stats(self) -> dict[str, int]:
        """Return ``total, free, used, allocated, reserved`` in bytes."""

    def initialize(self, local_rank: int | None = None) -> None:
        """Prepare the process: choose the device of ``local_rank`` when one is given."""
        if local_rank is not None:
            self.set_device(local_rank)
