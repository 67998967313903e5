"""A base class for users' Ray actors whose processes form a process group."""

from __future__ import annotations

from slime.utils.network import get_current_node_ip, get_free_port


class RayActor:
    """``master_addr`` and ``master_port`` are set by the subclass, usually on its first rank."""

    master_addr: str
    master_port: int

    @staticmethod
    def _get_current_node_ip_and_free_port(start_port: int = 10000, consecutive: int = 1) -> tuple[str, int]:
        """Return this node's address and the first of ``consecutive`` free ports from ``start_port`` on."""
        return get_current_node_ip(), get_free_port(start_port=start_port, consecutive=consecutive)

    def get_master_addr_and_port(self) -> tuple[str, int]:
        """Return where the ranks meet."""
        return self.master_addr, self.master_port
