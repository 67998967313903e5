"""Process groups beside the default one, for code that trains or syncs weights on its own."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)

BACKLOG = 2048

_gloo_group: Any = None


def init_gloo_group() -> Any:
    """Make the group of all ranks whose messages go over gloo, and return it; collective, once per process."""
    global _gloo_group
    if _gloo_group is None:
        _gloo_group = dist.new_group(backend="gloo")
    return _gloo_group


def get_gloo_group() -> Any:
    """Return the group of :func:`init_gloo_group`. Raises RuntimeError before that."""
    if _gloo_group is None:
        raise RuntimeError("there is no gloo group yet: call init_gloo_group() on every rank first")
    return _gloo_group


def control_group() -> Any:
    """Return the group for objects and barriers of all ranks: over gloo, also where the default group is NCCL's.

    Ranks that wait within NCCL keep their GPU busy, which engines may share, and are ended by its watchdog. None, which
    is the default group, where that is gloo's, and where :func:`init_gloo_group` has not been called.
    """
    return None if dist.get_backend() == "gloo" else _gloo_group


def share_gloo_device() -> None:
    """Give all gloo groups that this process makes from now on the network device of the first.

    A device is a thread that runs a hundred times a second. torch starts one for each group, and Megatron makes
    twenty groups: an idle trainer rank would take 5 % of a core.
    """
    from torch.distributed import distributed_c10d

    gloo: Any = distributed_c10d.ProcessGroupGloo
    if getattr(gloo, "shares_device", False):
        return
    first: list[Any] = []

    class SharedDeviceGloo(gloo):
        shares_device = True

        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            if not first:
                super().__init__(store, rank, size, timeout=timeout)
                first.append(self.options)
                return
            options = gloo._Options()
            options._devices, options._threads, options._timeout = first[0]._devices, first[0]._threads, timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharedDeviceGloo  # type: ignore[misc]


_served: WeakValueDictionary[tuple[str, int], Any] = WeakValueDictionary()
"""The stores that listen in this process, by host and port."""


def open_store(init_method: str, rank: int, world_size: int, timeout: timedelta) -> tuple[Any, int, int]:
    """Return the store of ``tcp://host:port``, ``file:///path`` or ``env://``, and the rank and size found there.

    That of rank 0 at ``tcp://`` listens on ``host`` only; torch's own listens on every interface, without
    authentication. It is left so where the host is a name, which may mean something else on other hosts. A file can
    be opened by those who have the right to: ranks of one host should meet at one.
    """
    from torch.distributed.distributed_c10d import rendezvous

    address = urlsplit(init_method)
    under_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if address.scheme != "tcp" or rank != 0 or under_torchrun or not _is_number(address.hostname or ""):
        store, rank, world_size = next(rendezvous(init_method, rank, world_size, timeout=timeout))
    else:
        place = address.hostname or "", address.port or 0
        # Groups of one process that meet at the same place share its server.
        how: dict[str, Any] = {} if place in _served else {"master_listen_fd": listen_on(*place).detach()}
        store = dist.TCPStore(*place, world_size, is_master=True, timeout=timeout, multi_tenant=True, **how)
        _served[place] = store
    store.set_timeout(timeout)
    return store, rank, world_size


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def listen_on(host: str, port: int) -> socket.socket:
    """Return a socket that listens at ``host``, or at all addresses where it is none of this host (a mapped one)."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as e:
            if e.errno != errno.EADDRNOTAVAIL:
                raise
            logger.warning("%s is no address of this host: ranks meet at port %d of all its addresses", host, port)
            listener.bind(("", port))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: dist.Store | None = None,
    group_name: Any = None,
    pg_options: object = None,
) -> Any:
    """Return a new process group, as ``torch.distributed.init_process_group`` makes the default one, but beside it.

    Its ranks need not be ranks of the default group, and there need be none. ``group_name`` is the prefix in the store:
    all members give the same one (SGLang's engines do as here).
    """
    from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

    timeout = timeout or timedelta(minutes=30)
    if (store is None) == (init_method is None):
        raise ValueError("give either store or init_method")
    if init_method is not None:
        store, rank, world_size = open_store(init_method, rank, world_size, timeout)
        store = PrefixStore(group_name or "default_pg", store)
    group, _ = _new_process_group_helper(
        world_size,
        rank,
        [],
        Backend(backend) if backend else Backend("undefined"),
        store,
        group_name=group_name,
        backend_options=pg_options,
        timeout=timeout,
    )
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def distributed_masked_whiten(
    values: Tensor,
    mask: Tensor,
    process_group: dist.ProcessGroup | None = None,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
) -> Tensor:
    """Return ``values`` [N] whitened over the masked entries of all ranks of ``process_group``, by default of all.

    See ``slime.algorithms.whitening.masked_whiten``.
    """
    from slime.algorithms.whitening import masked_whiten

    if process_group is None and dist.is_initialized():
        process_group = dist.group.WORLD
    return masked_whiten(values, mask, group=process_group, shift_mean=shift_mean, epsilon=epsilon)
