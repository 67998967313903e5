"""Write into the memory of other processes of this host, over TCP: with NIXL, or with mooncake's transfer engine.

Neither authenticates: a process that knows the address of an agent can write where the agent lets others write. NIXL
is bound to the loopback interface; mooncake listens on all.
"""

from __future__ import annotations

import base64
import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

PACKAGES = {"nixl": "nixl nixl-cu12 (with --no-deps)", "mooncake": "mooncake-transfer-engine-non-cuda"}
"""Backend, which is the name of its module, too -> what to install for it."""
HOST = "127.0.0.1"
_POLL_S = 0.0005
# With the module for InfiniBand come the wheel's own libnl and the system's, and a process with both ends by SIGSEGV.
UCX_OVER_TCP = {"UCX_TLS": "tcp", "UCX_MODULES": "^ib"}
"""Settings that NIXL's UCX reads when it starts: its other transports look for devices."""
UCX_ON_LOOPBACK = {"UCX_NET_DEVICES": "lo"}
_UCX = {**UCX_OVER_TCP, **UCX_ON_LOOPBACK}


class Write(NamedTuple):
    """``nbytes`` from the address ``local`` of this process to the address ``remote`` of another."""

    local: int
    remote: int
    nbytes: int


class TransferError(Exception):
    """Writes that did not arrive: ``reasons`` by peer; None where it was late."""

    def __init__(self, reasons: Mapping[str, str | None]) -> None:
        super().__init__("; ".join(f"{peer}: {reason or 'late'}" for peer, reason in reasons.items()))
        self.reasons = reasons


class Agent(Protocol):
    """This process's end. Memory is registered before it is read from, or before others get the address."""

    def register(self, regions: Iterable[tuple[int, int]], owner: object) -> None:
        """Make memory known: ``(address, bytes)`` of each region, none of which overlap; ``owner`` is kept with it."""
        ...

    def address(self) -> str:
        """Return what another agent needs to write into the memory that is registered now."""
        ...

    def connect(self, address: str) -> str:
        """Return the name of a peer, for :meth:`write`."""
        ...

    def write(self, writes: Mapping[str, Sequence[Write]], deadline_s: float) -> None:
        """Write to all peers at once, and return when all has arrived. Raises TransferError."""
        ...

    def close(self) -> None:
        """Forget all memory and peers; where something is still being written, when a later agent finds it ended.

        Neither library can take back what is on its way to a process that has stopped: it reads from this memory
        until that process continues or ends.
        """
        ...


_CLOSED: list[NixlAgent | MooncakeAgent] = []
"""Closed agents that have not forgotten their memory yet."""


def _forget_closed() -> None:
    for _ in range(len(_CLOSED)):
        agent = _CLOSED.pop(0)  # one that raises does so once, not at every later agent
        if not agent.forget():
            _CLOSED.append(agent)


def make_agent(backend: str) -> Agent:
    """Return an agent of ``--update-weight-p2p-backend``. Raises ImportError with the reason where it is missing."""
    _forget_closed()
    try:
        return NixlAgent() if backend == "nixl" else MooncakeAgent()
    except ImportError as e:
        why = "; it needs the system library libibverbs1" if "libibverbs" in str(e) else ""
        raise ImportError(f"--update-weight-p2p-backend {backend}: {e}{why}; pip install {PACKAGES[backend]}") from e


class NixlAgent:
    """NIXL with its UCX plug-in."""

    def __init__(self) -> None:
        before = {name: os.environ.get(name) for name in _UCX}
        os.environ.update(_UCX)
        try:
            from nixl._api import nixl_agent, nixl_agent_config

            self._agent: Any = nixl_agent(f"slime-{uuid.uuid4().hex}", nixl_agent_config(backends=["UCX"]))
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        self._registered: list[Any] = []
        self._owners: list[object] = []
        self._unfinished: list[Any] = []

    def register(self, regions: Iterable[tuple[int, int]], owner: object) -> None:
        self._owners.append(owner)
        described = [(address, nbytes, 0, "") for address, nbytes in regions if nbytes]
        self._registered.append(self._agent.register_memory(described, "DRAM"))

    def address(self) -> str:
        return base64.b64encode(self._agent.get_agent_metadata()).decode("ascii")

    def connect(self, address: str) -> str:
        name: bytes | str = self._agent.add_remote_agent(base64.b64decode(address))
        return name.decode() if isinstance(name, bytes) else name

    def write(self, writes: Mapping[str, Sequence[Write]], deadline_s: float) -> None:
        reasons: dict[str, str | None] = {}
        handles: dict[str, Any] = {}
        for peer, parts in writes.items():
            try:
                local = self._agent.get_xfer_descs([(w.local, w.nbytes, 0) for w in parts], "DRAM")
                remote = self._agent.get_xfer_descs([(w.remote, w.nbytes, 0) for w in parts], "DRAM")
                handles[peer] = self._agent.initialize_xfer("WRITE", local, remote, peer)
                self._agent.transfer(handles[peer])
            except Exception as e:  # noqa: BLE001  (NIXL has an exception class per status)
                reasons[peer] = f"{type(e).__name__}: {e}"
        deadline = time.monotonic() + deadline_s
        waiting = set(handles) - set(reasons)
        while waiting:
            for peer in list(waiting):
                state = self._state(handles[peer])
                if state != "PROC":
                    waiting.remove(peer)
                    if state != "DONE":
                        reasons[peer] = state
            if time.monotonic() > deadline:
                break
            if waiting:
                time.sleep(_POLL_S)
        for peer, handle in handles.items():
            if peer in waiting:
                self._unfinished.append(handle)
            else:
                handle.release()
        if reasons or waiting:
            raise TransferError(reasons | dict.fromkeys(waiting))

    def _state(self, handle: object) -> str:
        try:
            state: str = self._agent.check_xfer_state(handle)
            return "NIXL reports an error" if state == "ERR" else state
        except Exception as e:  # noqa: BLE001  (NIXL has an exception class per status)
            return f"{type(e).__name__}: {e}"

    def close(self) -> None:
        _CLOSED.append(self)
        _forget_closed()

    def forget(self) -> bool:
        """Forget all memory and peers if nothing is being written; return True then."""
        for handle in [h for h in self._unfinished if self._state(h) != "PROC"]:
            handle.release()
            self._unfinished.remove(handle)
        if self._unfinished:
            return False
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        self._registered, self._owners, self._agent = [], [], None
        return True


class MooncakeAgent:
    """mooncake's transfer engine, whose peers find each other without a metadata server."""

    def __init__(self) -> None:
        from mooncake.engine import TransferEngine

        self._engine: Any = TransferEngine()
        if self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError(f"mooncake's transfer engine does not start on {HOST} with protocol tcp")
        self._addresses: list[int] = []
        self._owners: list[object] = []
        self._unfinished: list[Future[int]] = []
        self._pool = ThreadPoolExecutor(thread_name_prefix="mooncake")

    def register(self, regions: Iterable[tuple[int, int]], owner: object) -> None:
        self._owners.append(owner)
        addresses, sizes = zip(*((address, nbytes) for address, nbytes in regions if nbytes), strict=True)
        if code := self._engine.batch_register_memory(list(addresses), list(sizes)):
            raise RuntimeError(f"mooncake cannot register memory (code {code})")
        self._addresses += addresses

    def address(self) -> str:
        return f"{HOST}:{self._engine.get_rpc_port()}"

    def connect(self, address: str) -> str:
        return address

    def write(self, writes: Mapping[str, Sequence[Write]], deadline_s: float) -> None:
        started: dict[str, Future[int]] = {}
        for peer, parts in writes.items():
            local, remote, sizes = (list(column) for column in zip(*parts, strict=True))
            started[peer] = self._pool.submit(self._engine.batch_transfer_sync_write, peer, local, remote, sizes)
        deadline = time.monotonic() + deadline_s
        reasons: dict[str, str | None] = {}
        for peer, future in started.items():
            try:
                code = future.result(timeout=max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                reasons[peer] = None
                self._unfinished.append(future)
            else:
                if code:
                    reasons[peer] = f"mooncake reports code {code}"
        if reasons:
            raise TransferError(reasons)

    def close(self) -> None:
        _CLOSED.append(self)
        _forget_closed()

    def forget(self) -> bool:
        """Forget all memory and peers if nothing is being written; return True then."""
        if not all(future.done() for future in self._unfinished):
            return False
        self._pool.shutdown(wait=False)
        if self._addresses:
            self._engine.batch_unregister_memory(self._addresses)
        self._addresses, self._owners, self._engine = [], [], None
        return True
