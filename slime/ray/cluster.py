"""The Ray cluster of a run: its own, in processes of this host, or one that is already running.

Invariant: after ``shutdown`` no process of the run is left on this host, and if this process is killed before, none is
left a few seconds later. Every process of a run has ``SLIME_RUN_ID`` in its environment; janitors end what remains.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import secrets
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

import slime
from slime.arguments.args import Args
from slime.arguments.passthrough.catalog import has_cuda_device
from slime.arguments.passthrough.source import CORE_VARIABLE
from slime.arguments.rules.lora import takes_adapters
from slime.backends.sglang_utils import engine_forks
from slime.observability import run_dir
from slime.observability.best_effort import Files
from slime.ray import directories
from slime.utils.process_guard import GUARD_TAG, KEEP_ENVIRON, RUN_TAG, Janitor, start_janitor
from slime.utils.run_state import record
from slime.utils.secrets import PASSED, public_environment
from slime.weights.p2p.agents import UCX_ON_LOOPBACK, UCX_OVER_TCP

logger = logging.getLogger(__name__)

Device: TypeAlias = Literal["cpu", "cuda"]
SLOT = "slime_slot"
LONGEST_SOCKET = 107
"""Bytes that the path of a Unix socket may have (``sun_path``)."""
SOCKET_OF_RAY = "ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
HEAD_NODE = "node:__internal_head__"
NODE_SHARE = 0.001
"""Of the resource that a node has one of."""
MANAGER_FILE = "manager.json"
SMALL_MACHINE_BYTES = 64 * 2**30
SMALL_OBJECT_STORE_BYTES = 1 * 2**30
JANITOR_DEADLINE_S = 60.0
CONNECT_SECONDS = 20.0
RAY_TIMED_OUT = "timed out during startup"
"""Part of Ray's message when its node has not registered in time; the timeout cannot be set."""
_SOURCE_ROOT = str(Path(slime.__file__).parents[1])

QUIET_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    # One idle worker per core otherwise, 0.8 CPU s each: a run's actors have environments of their own and take none.
    "RAY_prestart_worker_first_driver": "0",
}
NOSET_VISIBLE_DEVICES = (
    "CUDA_VISIBLE_DEVICES",
    "MUSA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "HABANA_VISIBLE_MODULES",
    "NEURON_RT_VISIBLE_CORES",
    "TPU_VISIBLE_CHIPS",
    "ONEAPI_DEVICE_SELECTOR",
)
"""Ray must not hide devices from workers: ranks choose theirs, and engines see those of their neighbors."""


@dataclass
class Cluster:
    """The connection of this process to Ray.

    run_id: names the run; in the environment of its every process. own: this process started Ray and ends it.
    device_type: ``cuda`` or ``cpu``. slot: the resources of one slot, a GPU or a process. node_id: this host's.
    address: where others join.
    """

    run_id: str
    own: bool
    device_type: Device
    slot: dict[str, float]
    node_id: str
    janitor: Janitor
    node_janitors: dict[str, Any] = field(default_factory=dict)
    address: str = ""

    def share_of_slot(self, fraction: float) -> dict[str, Any]:
        """Return Ray actor options that take ``fraction`` of a slot."""
        options: dict[str, Any] = {"num_cpus": round(self.slot.get("CPU", 0.0) * fraction, 4)}
        if "GPU" in self.slot:
            options["num_gpus"] = self.slot["GPU"] * fraction
        if SLOT in self.slot:
            options["resources"] = {SLOT: self.slot[SLOT] * fraction}
        return options

    def name_manager(self, directory: Path) -> dict[str, str]:
        """Return Ray actor options that name the manager; commands find it through ``<directory>/manager.json``."""
        # A driver of the user's own may make one after the other.
        name = {"name": f"manager-{secrets.token_hex(4)}", "namespace": f"slime-{self.run_id}"}
        where = {"ray_address": self.address, "ray_auth_mode": os.environ.get("RAY_AUTH_MODE"), **name}
        Files("the place of the manager, which `slime engines` needs,").write(
            directory / MANAGER_FILE, (json.dumps(where) + "\n").encode()
        )
        return name

    def wiring_of_engines(self) -> dict[str, Any]:
        """Return what it takes to start an engine on a slot, and to reserve more slots."""
        return {
            "engine_options": self.share_of_slot(0.2),
            "runtime_env": self.environment(),
            "slot": dict(self.slot),
        }

    def whole_cpu(self) -> dict[str, Any]:
        """Return Ray actor options of a process that needs no slot: a CPU where there are many, nothing otherwise.

        It is on this host, since the run ends with it; elsewhere, with a warning, where Ray has no CPU here to give.
        """
        if self.device_type == "cpu":
            return {"num_cpus": 0, "num_gpus": 0, **on_node(self.node_id)}
        if _resources_of(self.node_id).get("CPU", 0) < 1:
            logger.warning(
                "Ray has no CPU on this node (ray start --num-cpus): the manager of the engines and its routers, which "
                "need one, are put on another node, and the run is lost with either of the two"
            )
        here = NodeAffinitySchedulingStrategy(self.node_id, soft=True)
        return {"num_cpus": 1, "num_gpus": 0, "scheduling_strategy": here}

    def environment(self, extra: dict[str, str] | None = None) -> dict[str, dict[str, str]]:
        """Return the ``runtime_env`` of an actor of this run; ``extra`` wins."""
        env = {RUN_TAG: self.run_id, **KEEP_ENVIRON, "RAY_USE_UVLOOP": "0"}
        env |= {f"RAY_EXPERIMENTAL_NOSET_{name}": "1" for name in NOSET_VISIBLE_DEVICES}
        env["PYTHONPATH"] = _python_path()
        # A cluster that was joined has its own environment: what it starts does not inherit this process's.
        env |= {name: os.environ[name] for name in (CORE_VARIABLE, PASSED) if name in os.environ}
        if self.device_type == "cpu":
            # All processes share few cores; PyTorch's default of one thread per core each would make them fight.
            env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        return {"env_vars": {**env, **(extra or {})}}

    def tensor_transport(self, args: Args, extra: dict[str, str] | None = None) -> dict[str, Any]:
        """Return Ray actor options of processes that send or receive train data: their environment with ``extra``,
        and what ``--rollout-data-transport nixl`` needs."""
        if args.rollout_data_transport == "object-store":
            return {"runtime_env": self.environment(extra)}
        without_gpu = UCX_OVER_TCP if self.device_type == "cpu" else {}
        loopback = UCX_ON_LOOPBACK if self.device_type == "cpu" and spans_one_host() else {}
        env = {**without_gpu, **loopback, **(extra or {})}
        return {"runtime_env": self.environment(env), "enable_tensor_transport": True}

    def watch_nodes(self, node_ids: list[str]) -> None:
        """Put a janitor on every other node of the run.

        Raises TimeoutError when one does not start, RuntimeError when a node has left.
        """
        remote_nodes = [n for n in dict.fromkeys(node_ids) if n != self.node_id and n not in self.node_janitors]
        for node_id in remote_nodes:
            self.node_janitors[node_id] = (
                ray.remote(NodeJanitor).options(num_cpus=0, **on_node(node_id)).remote(self.run_id)
            )
        started = [self.node_janitors[n].started.remote() for n in remote_nodes]
        ready = ray.wait(started, num_returns=len(started), timeout=JANITOR_DEADLINE_S)[0] if started else []
        if len(ready) < len(started):
            nodes = ", ".join(remote_nodes)
            raise TimeoutError(f"the janitors of the nodes {nodes} did not start within {JANITOR_DEADLINE_S:.0f} s")

    def shutdown(self) -> None:
        """Disconnect, and end what is left of the run on this host (and, through their janitors, elsewhere)."""
        global _current, _forks
        if _current is self:
            _current = None
        for actor in self.node_janitors.values():
            ray.kill(actor)
        ray.shutdown()
        self.janitor.sweep()
        if _forks is not None:
            _forks.kill()
            _forks.wait(JANITOR_DEADLINE_S)
            _forks = None
            Path(os.environ.pop(engine_forks.SOCKET)).unlink(missing_ok=True)
        directories.release()


class NodeJanitor:
    """An actor that does nothing: when it ends, its child ends what is left of the run on its node."""

    def __init__(self, run_id: str) -> None:
        self._janitor = start_janitor(f"{RUN_TAG}={run_id}")

    def started(self) -> bool:
        return True


_current: Cluster | None = None
_forks: subprocess.Popen[bytes] | None = None


def is_connected() -> bool:
    """Return whether ``connect`` has succeeded and ``shutdown`` has not been called since."""
    return _current is not None


def spans_one_host() -> bool:
    """True when the Ray cluster is one host: servers then listen on loopback."""
    return len({n["NodeID"] for n in ray.nodes() if n["Alive"]}) == 1


def current() -> Cluster:
    """Return the connection. Raises RuntimeError before ``connect``."""
    if _current is None:
        raise RuntimeError("not connected to Ray yet: call slime.ray.cluster.connect(args) first")
    return _current


def connect(args: Args, slots: int) -> Cluster:
    """Connect to Ray, once per process, and settle what depends on the devices found.

    ``--ray-address``, ``RAY_ADDRESS`` (``ray job submit`` sets it) or an earlier ``ray.init`` join a running
    cluster; otherwise one is started in processes of this host that listens on loopback only, with ``slots`` slots.
    Sets ``args.run_id``, ``args.run_dir`` where it is not set and, through ``finalize_for_device``, what depends on the
    device.
    """
    global _current
    if _current is not None:
        return _current
    directories.hold(args)  # also for a driver of the user's own
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
    janitor = start_janitor(f"{RUN_TAG}={run_id}")
    try:
        own = _join_or_start(args, run_id, slots)
        totals = ray.cluster_resources()
        device_type = device_of_cluster(totals, os.environ.get("SLIME_ACCELERATOR"))
        cluster = Cluster(
            run_id=run_id,
            own=own,
            device_type=device_type,
            slot=slot_resources(device_type, has_slots=SLOT in totals),
            node_id=ray.get_runtime_context().get_node_id(),
            janitor=janitor,
            address=ray.get_runtime_context().gcs_address,
        )
        from slime.arguments.device import finalize_for_device

        if not args.run_dir:  # a driver of the user's own
            run_dir.prepare(args)
        record(args, run_id=run_id)
        finalize_for_device(args, device_type)
    except BaseException:  # an interrupted start must leave no process either
        ray.shutdown()
        janitor.sweep()
        raise
    _current = cluster
    where = "own Ray" if own else f"Ray at {ray.get_runtime_context().gcs_address}"
    logger.info("run %s on %s: %s, device %s", run_id, where, describe_resources(totals), device_type)
    return cluster


def device_of_cluster(totals: dict[str, float], override: str | None) -> Device:
    """Return ``cuda`` or ``cpu``: ``SLIME_ACCELERATOR``, else whether the cluster has GPUs."""
    if override in ("cpu", "cuda"):
        return cast(Device, override)
    return "cuda" if totals.get("GPU", 0) > 0 else "cpu"


def slot_resources(device_type: str, *, has_slots: bool) -> dict[str, float]:
    """Return the resources that one slot reserves.

    A GPU and a CPU; without GPUs the custom resource of a cluster that slime started, or so little of a CPU that
    any number of slots fits on a foreign cluster.
    """
    if device_type == "cuda":
        return {"GPU": 1.0, "CPU": 1.0}
    return {SLOT: 1.0} if has_slots else {"CPU": 0.01}


def node_resource(node_id: str) -> str:
    """Return the resource that only that node has, one of it: ``node:`` and its address.

    Raises RuntimeError when the node has left.
    """
    for name in _resources_of(node_id):
        if name.startswith("node:") and name != HEAD_NODE:
            return name
    raise RuntimeError(f"the node {node_id} has left the Ray cluster while processes were being placed on it")


def on_node(node_id: str) -> dict[str, Any]:
    """Return Ray actor options that put an actor without other resources on that node, and nowhere else.

    The affinity alone does not: Ray lets any node place an actor that needs nothing, also one that has just joined and
    does not know that node yet. One that needs something is placed by the node that asks for it. Raises RuntimeError
    when the node has left.
    """
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return {"resources": {node_resource(node_id): NODE_SHARE}, "scheduling_strategy": there}


def _resources_of(node_id: str) -> dict[str, float]:
    """Return the total resources of a node; nothing of one that is gone."""
    found: dict[str, float] = next((node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id), {})
    return found


def on_slot(pg: PlacementGroup, bundle: int) -> PlacementGroupSchedulingStrategy:
    """Return the scheduling of an actor on one slot."""
    return PlacementGroupSchedulingStrategy(pg, placement_group_bundle_index=bundle)


def own_gpu_index() -> int:
    """Return the index, among the devices this process sees, of the GPU that Ray gave it; 0 without one.

    Ray does not hide devices from the processes of a run (``cluster.NOSET_VISIBLE_DEVICES``), but the process
    that started Ray may have: its ids are then the entries of ``CUDA_VISIBLE_DEVICES``, while torch and SGLang count
    what is visible.
    """
    return gpu_index(ray.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def gpu_index(ids: Sequence[int | str], visible: str | None) -> int:
    """Return the index of ``ids[0]`` in the list ``visible`` (unset or empty: all devices); 0 without ids.

    Raises ValueError for an id that is not in the list.
    """
    if not ids:
        return 0
    entries = visible.split(",") if visible else []
    if not entries:
        return int(ids[0])
    if str(ids[0]) not in entries:
        raise ValueError(f"Ray gave this process GPU {ids[0]}, which CUDA_VISIBLE_DEVICES={visible} does not show it")
    return entries.index(str(ids[0]))


def node_sort_key(address: str) -> tuple[int, ...]:
    """Return a key that orders nodes by IP address number; names are resolved, or ordered by their characters."""
    try:
        return tuple(ipaddress.ip_address(address).packed)
    except ValueError:
        pass
    try:
        return tuple(ipaddress.ip_address(socket.gethostbyname(address)).packed)
    except OSError:
        return tuple(map(ord, address))


def describe_resources(resources: dict[str, float]) -> str:
    """Return the countable resources of a cluster or node on one line."""
    shown = {k: v for k, v in sorted(resources.items()) if k in ("CPU", "GPU", SLOT)}
    return ", ".join(f"{k} {v:g}" for k, v in shown.items()) or "no CPU, no GPU"


def _join_or_start(args: Args, run_id: str, slots: int) -> bool:
    """Connect; return True when this process started the cluster."""
    forks = os.environ.pop(engine_forks.SOCKET, None) != ""  # else that of an earlier run of this process
    if ray.is_initialized():
        return False
    for name, value in QUIET_RAY.items():
        os.environ.setdefault(name, value)
    _keep_sigterm_handler()
    if args.hf_checkpoint and not os.path.isdir(args.hf_checkpoint):  # trainers and engines ask the Hub for it
        passed = os.environ.get(PASSED, "")
        os.environ[PASSED] = ",".join([passed, *HUB_TOKENS]).strip(",")
    address = args.ray_address or os.environ.get("RAY_ADDRESS")
    if address and address != "local":
        try:
            _require_listener(address)
            ray.init(address=address, namespace=f"slime-{run_id}", logging_level=logging.WARNING, log_to_driver=True)
        except (OSError, ValueError, RuntimeError) as e:
            origin = "--ray-address" if args.ray_address else "the environment variable RAY_ADDRESS"
            raise ConnectionError(
                f"cannot join the Ray cluster {address!r} that {origin} names: {e}. "
                "Start one with `ray start --head`, or leave both unset to let slime start its own."
            ) from e
        return False
    # Ray's own processes inherit these: the janitor finds them, and workers import what this process can import.
    os.environ.update({RUN_TAG: run_id, **KEEP_ENVIRON})
    os.environ.pop(GUARD_TAG, None)
    _use_loopback()
    with _without_secrets():
        if forks:
            _start_fork_server(args, run_id)
        _start_twice(run_id, slots)
    return True


@contextlib.contextmanager
def _without_secrets() -> Iterator[None]:
    """Keep the secrets of this process's environment from what is started within the block."""
    kept = dict(os.environ)
    hidden = kept.keys() - public_environment().keys()
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update({name: kept[name] for name in hidden})


def _python_path() -> str:
    """Return the PYTHONPATH of the actors of a run."""
    return os.pathsep.join(p for p in (_SOURCE_ROOT, os.environ.get("PYTHONPATH", "")) if p)


def _start_fork_server(args: Args, run_id: str) -> None:
    """On a host without GPUs, have SGLang imported for the engines while Ray starts."""
    global _forks
    without_gpu = os.environ.get("SLIME_ACCELERATOR", "cpu") == "cpu" and not has_cuda_device()
    if args.debug_train_only or args.rollout_external or not without_gpu:
        return
    path = str(private_directory() / f"{run_id}.forks")
    base = {**public_environment(), "PYTHONPATH": _python_path()}
    _forks = engine_forks.start_fork_server(path, base, takes_adapters=takes_adapters(args))
    os.environ[engine_forks.SOCKET] = path


def secrets_of_users() -> dict[str, str]:
    """Return the secrets of the environment that users' functions may need: all but those of the tracker and Ray."""
    public = public_environment()
    return {k: v for k, v in os.environ.items() if k not in public and not k.startswith("WANDB_")}


def _start_twice(run_id: str, slots: int) -> None:
    try:
        _start(run_id, slots)
    except Exception as e:
        if RAY_TIMED_OUT not in str(e):
            raise
        logger.warning("Ray has not started within its 30 s on a busy machine, and is started once more: %s", e)
        ray.shutdown()
        start_janitor(f"{RUN_TAG}={run_id}").sweep()  # what is left of it, which ``shutdown`` does not know
        _start(run_id, slots)


def _start(run_id: str, slots: int) -> None:
    """Start Ray in processes of this host, and connect."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    make_token_private()
    ray.init(
        address="local",
        namespace=f"slime-{run_id}",
        num_cpus=os.cpu_count(),
        resources={SLOT: max(slots, 1)},
        object_store_memory=SMALL_OBJECT_STORE_BYTES if memory < SMALL_MACHINE_BYTES else None,
        include_dashboard=False,
        logging_level=logging.WARNING,
        log_to_driver=True,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(private_directory() / "ray"),
    )


def private_directory() -> Path:
    """Return the directory of this user, which no other user can enter, where Ray keeps sockets, logs and sessions.

    Ray lets everybody write to its own directories.
    """
    parent = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    name = f"slime-ray-{os.getuid()}"
    if len(os.fsencode(f"{parent}/{name.ljust(18)}/{SOCKET_OF_RAY}")) > LONGEST_SOCKET:  # 18: mkdtemp's, see below
        parent = "/tmp"
    directory = Path(parent) / name
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700, parents=True)
    found = directory.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
        directory.chmod(0o700)
        return directory
    return Path(tempfile.mkdtemp(prefix="slime-ray-", dir=parent))  # somebody else has made it


def make_token_private() -> None:
    """Let only this user read the token that protects Ray's clusters, which Ray writes for everybody to read."""
    file = Path.home() / ".ray" / "auth_token"
    with contextlib.suppress(OSError):  # no home, or a file of another user: Ray says what is wrong, if anything is
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent) as token:
            token.write(secrets.token_hex(32))
            token.flush()
            with contextlib.suppress(FileExistsError):  # whole, or the one of another run
                os.link(token.name, file)
        file.chmod(0o600)


def _use_loopback() -> None:
    """Let Ray use loopback only, as it does by default on macOS and Windows.

    Unless this switch of Ray's is off it replaces ``_node_ip_address="127.0.0.1"`` by the host's address.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # one line per connection


def manager_of_run(directory: Path) -> Any:
    """Connect to the Ray cluster of the run in ``directory``; return the handle of its manager.

    Raises ConnectionError when the run is over, or its cluster cannot be reached from this host.
    """
    try:
        where = json.loads((directory / MANAGER_FILE).read_text())
        _require_listener(where["ray_address"])
        is_local = where["ray_address"].startswith("127.0.0.1:")
        if is_local:
            _use_loopback()
        if where["ray_auth_mode"]:  # Ray knows the token, one per user, but uses it by default only where it starts
            os.environ["RAY_AUTH_MODE"] = where["ray_auth_mode"]
            ray._raylet.Config.initialize("")  # type: ignore[attr-defined]
        ray.init(
            address=where["ray_address"],
            namespace=where["namespace"],
            logging_level=logging.WARNING,
            log_to_driver=False,
            _node_ip_address="127.0.0.1" if is_local else None,
        )
        return ray.get_actor(where["name"])
    except (OSError, ValueError, RuntimeError) as e:
        raise ConnectionError(
            f"no run in progress is found through {directory / MANAGER_FILE}: {e}. Give the --run-dir of a run, on a "
            "host of its Ray cluster"
        ) from e


def _keep_sigterm_handler() -> None:
    """Keep an existing SIGTERM handler: Ray would replace it by one that ends the process with code 15 immediately."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        ray._private.utils.set_sigterm_handler = lambda handler: None


def _require_listener(address: str) -> None:
    """Raise OSError when nothing listens at ``host:port``; Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if "://" not in address and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
