"""Hosts of a Ray cluster on one machine: each has processes and a network of its own, and can be switched off."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from slime.backends.sglang_utils.ports import reserve_ports
from slime.utils.process_guard import GuardedProcess, spawn

RAY = str(Path(sys.executable).with_name("ray"))
NETWORK = f"10.213.{os.getpid() % 250}"
HEAD = f"{NETWORK}.1"
BRIDGE = f"slime{os.getpid() % 100000}"
READY_S = 120.0
STARTS = 3
NUMBERS = itertools.count(2)
"""Of all hosts of this process: the network of one is gone only after its last process, perhaps in the next test."""


def ip(words: str) -> None:
    """Run the program of that name."""
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise OSError(f"ip {words}: {done.stderr.strip()}")


class Machine:
    """A host at ``NETWORK.<number>`` that has joined the cluster: a network and a process namespace."""

    def __init__(self, number: int, process: GuardedProcess) -> None:
        self.address, self._name, self._process = f"{NETWORK}.{number}", f"{BRIDGE}-{number}", process

    def terminate(self) -> None:
        """Send SIGTERM to its ``ray start --block``, as the end of a pod does: Ray drains the node before it ends."""
        inside = psutil.Process(self._process.pid).children(recursive=True)
        (start,) = [process for process in inside if "--block" in process.cmdline()]
        start.terminate()

    def switch_off(self) -> None:
        """End all of it at once, without a word to anyone: who waits for an answer of it gets neither that nor an end.

        Its network goes first, or the kernel would close the connections of processes that end.
        """
        with contextlib.suppress(OSError):
            ip(f"netns exec {self._name} ip link set eth0 down")
        self._process.stop(0.0)
        with contextlib.suppress(OSError):
            ip(f"netns del {self._name}")


class Machines:
    """A Ray cluster whose head is on this host; hosts with ``slots`` each may be added. Use as a context manager.

    ``joining``: the environment of a driver on the head.
    """

    def __init__(self, root: Path, head_slots: int, slots: int) -> None:
        self._root, self._slots = root, slots
        port, dashboard, agent, metrics, client = reserve_ports(5)
        self._gcs = f"{HEAD}:{port}"
        # Clients of a cluster need to know of token authentication. A token of our own touches no file of the user's.
        auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "OMP_NUM_THREADS": "1"}
        self._env = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "SLIME_RUN_ID")} | auth
        self.joining = {**auth, "RAY_ADDRESS": self._gcs, "SLIME_HOST_IP": HEAD}
        self._head_words = f"""--head --port {port} --include-dashboard false --dashboard-port {dashboard}
            --dashboard-agent-listen-port {agent} --metrics-export-port {metrics} --ray-client-server-port {client}
            --temp-dir {root}"""
        self._head_slots = head_slots
        self._running: list[Machine] = []
        self._head: GuardedProcess | None = None

    def __enter__(self) -> Machines:
        try:
            ip(f"link add {BRIDGE} type bridge")
        except OSError as e:
            pytest.skip(f"hosts on one machine need the right to make networks: {e}")
        try:
            ip(f"addr add {HEAD}/24 dev {BRIDGE}")
            ip(f"link set {BRIDGE} up")
            self._head = self._start("head", (), HEAD, self._head_slots, self._head_words)
            assert self._joins(HEAD, self._head), self._head.last_lines()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self._running:
            machine.switch_off()
        if self._head is not None:
            self._head.stop(3.0)
        ip(f"link del {BRIDGE}")

    def add(self) -> Machine:
        """Switch a new host on, and return when it has joined.

        Ray gives a start up after 30 s, which is too early on a busy machine: it is tried again.
        """
        number = next(NUMBERS)
        name, address = f"{BRIDGE}-{number}", f"{NETWORK}.{number}"
        outside = f"sl{os.getpid() % 100000}.{number}"
        ip(f"netns add {name}")
        ip(f"link add {outside} type veth peer name eth0 netns {name}")
        ip(f"link set {outside} master {BRIDGE} up")
        for words in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            ip(f"netns exec {name} ip {words}")
        namespaces = ("ip", "netns", "exec", name, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
        for _ in range(STARTS):
            process = self._start(name, namespaces, address, self._slots, f"--address {self._gcs}")
            machine = Machine(number, process)
            self._running.append(machine)
            if self._joins(address, process):
                return machine
        raise AssertionError(process.last_lines())

    def drain(self, machine: Machine, seconds: int) -> None:
        """Tell Ray that ``machine`` is taken away in so many seconds, as an autoscaler does."""
        program = f"""import ray
ray.init(logging_level=40)
print({{node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}}["{machine.address}"])"""
        env = {**self._env, "RAY_ADDRESS": self._gcs}
        found = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
        words = f"""drain-node --address {self._gcs} --node-id {found.stdout.split()[-1]} --reason-message test
            --reason DRAIN_NODE_REASON_PREEMPTION --deadline-remaining-seconds {seconds}"""
        subprocess.run([RAY, *words.split()], env=env, check=True, capture_output=True, timeout=READY_S)

    def _start(self, name: str, before: Sequence[str], address: str, slots: int, words: str) -> GuardedProcess:
        command = f"""{RAY} start --block --num-cpus 2 --node-ip-address {address} --min-worker-port 0
            --max-worker-port 0 --object-store-memory 200000000 --disable-usage-stats {words}"""
        resources = ["--resources", f'{{"slime_slot": {slots}}}']
        # All hosts have one name, which resolves to an address of none of their networks.
        env = {**self._env, "SLIME_HOST_IP": address, "GLOO_SOCKET_IFNAME": "eth0" if before else BRIDGE}
        return spawn([*before, *command.split(), *resources], env, self._root / f"{name}.log", name)

    def _joins(self, address: str, process: GuardedProcess) -> bool:
        """Wait until a host is in the cluster; return False when its ``ray start``, ``process``, has ended before."""
        end = time.monotonic() + READY_S
        env = {**self._env, "RAY_ADDRESS": self._gcs}
        program = """import ray
ray.init(logging_level=40)
print([node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]])"""
        command = [sys.executable, "-c", program]
        while True:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=READY_S)
            if f"'{address}'" in done.stdout:
                return True
            if process.poll() is not None:
                return False
            assert time.monotonic() < end, (done.stdout, done.stderr, process.last_lines())
            time.sleep(0.5)
