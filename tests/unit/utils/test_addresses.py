"""Addresses where ranks meet: of either family, and listeners that others do not reach."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from slime.ray.actors.train_actor import TrainRayActor
from slime.ray.manager.engines.served_model import ServedModel
from slime.rollout.requests.engines import model_url
from slime.servers.types import EngineInfo
from slime.utils import distributed_utils
from slime.utils.distributed_utils import open_store
from slime.utils.network import join_address
from slime.weight_sync import process_group

FD = "fd00::1"


def listeners_of_this_process(port: int) -> set[str]:
    """Return the addresses at which this process listens for TCP connections to ``port``, from /proc."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, _, its_port = fields[1].partition(":")
            if fields[3] == "0A" and fields[9] in inodes and int(its_port, 16) == port:
                raw = bytes.fromhex(address)
                words = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
                found.add(socket.inet_ntop(family, words))
    return found


def free_port(host: str) -> int:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (FD, "[fd00::1]:5"),
        ("[fd00::1]", "[fd00::1]:5"),
        ("10.0.0.1", "10.0.0.1:5"),
        ("node-7", "node-7:5"),
        ("fe80::1%eth0", "[fe80::1%eth0]:5"),
    ],
)
def test_an_address_of_either_family(host: str, expected: str) -> None:
    assert join_address(host, 5) == expected


@pytest.mark.parametrize("given", [FD, f"[{FD}]"])
def test_engines_of_other_hosts_meet_at_a_url_of_ipv6(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    told: list[dict[str, Any]] = []

    class Client:
        url = f"http://[{FD}]:15000"

        def init_weights_update_group(self, **about: Any) -> None:
            told.append(about)

    monkeypatch.setenv("SLIME_HOST_IP", given)
    monkeypatch.setattr(process_group, "init_process_group", lambda *a, **k: asked.append(a))
    clients: Any = [Client()]
    process_group.EngineGroup([EngineInfo(Client.url)], clients, name="g", backend="gloo", timeout_s=5)
    assert told[0]["master_address"] == FD
    assert asked[0][1] == f"tcp://[{FD}]:{told[0]['master_port']}"


def test_the_router_of_an_ipv6_host_has_a_url_that_plug_ins_put_together() -> None:
    router = Namespace(host=FD, port=15001)
    model = ServedModel.__new__(ServedModel)
    model.router = router
    host, port = model.address
    assert f"http://{host}:{port}/generate" == f"http://[{FD}]:15001/generate"
    args = Namespace(sglang_model_routers={"default": (host, port)}, sglang_router_ip=host, sglang_router_port=port)
    assert model_url(args, "default", "/generate") == f"http://[{FD}]:15001/generate"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_store_of_rank_0_listens_at_its_address_only(host: str) -> None:
    port = free_port(host)
    store, rank, size = open_store(f"tcp://{join_address(host, port)}", 0, 1, timedelta(seconds=5))
    try:
        assert (rank, size) == (0, 1)
        store.set("key", "value")
        assert store.get("key") == b"value"
        assert listeners_of_this_process(port) == {host}
    finally:
        del store


def test_two_groups_may_meet_at_one_address() -> None:
    method = f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
    first, _, _ = open_store(method, 0, 1, timedelta(seconds=5))
    second, _, _ = open_store(method, 0, 1, timedelta(seconds=5))
    first.set("key", "value")
    assert second.get("key") == b"value"
    del first  # the other one still listens
    assert second.get("key") == b"value"
    third, _, _ = open_store(method, 0, 1, timedelta(seconds=5))
    assert third.get("key") == b"value"
    del second, third
    open_store(method, 0, 1, timedelta(seconds=5))  # the port is free again


def test_an_address_that_a_gateway_maps_is_listened_for_everywhere(caplog: pytest.LogCaptureFixture) -> None:
    from slime.utils.distributed_utils import listen_on

    with listen_on("192.0.2.7", 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
    assert "192.0.2.7" in caplog.text


def test_ranks_of_one_host_meet_at_a_private_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.ray.actors.worker.begin", lambda args, name: Path("log"))
    actor = TrainRayActor(Namespace(), "actor", 0, 2)
    path, port = actor.master(True)
    directory = Path(path).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert 0 < port < 65536
    host, _ = actor.master(False)
    assert not host.startswith("/")


def test_engines_of_this_host_get_a_private_file(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    told: list[dict[str, Any]] = []

    class Client:
        url = "http://127.0.0.1:15000"

        def init_weights_update_group(self, **about: Any) -> None:
            told.append(about)

        def destroy_weights_update_group(self, **about: Any) -> None:
            pass

    monkeypatch.setattr(process_group, "init_process_group", lambda *a, **k: asked.append(a) or "group")
    monkeypatch.setattr(process_group.dist, "destroy_process_group", lambda group: None)
    clients: Any = [Client()]
    group = process_group.EngineGroup([EngineInfo(Client.url)], clients, name="g", backend="gloo", timeout_s=5)
    path = told[0]["master_address"]
    assert asked[0][1] == f"file://{path}"
    assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
    group.close()
    assert not Path(path).parent.exists()
    # An engine that others started knows TCP stores only.
    process_group.EngineGroup([EngineInfo(Client.url, life=1)], clients, name="g", backend="gloo", timeout_s=5)
    assert told[1]["master_address"] == "127.0.0.1"
    assert asked[1][1] == f"tcp://127.0.0.1:{told[1]['master_port']}"


RANK = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
from slime.utils.distributed_utils import init_process_group
rank, *places = sys.argv[1:]
for name, where in enumerate(places):
    group = init_process_group("gloo", where, timedelta(seconds=20), 2, int(rank), group_name=str(name))
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    print(x.sum().item())
"""


@pytest.mark.slow
def test_two_ranks_meet_in_a_file_and_at_addresses_of_both_families(tmp_path: Path) -> None:
    places = [f"tcp://{join_address(host, free_port(host))}" for host in ("127.0.0.1", "::1")]
    places.append(f"file://{tmp_path}/store")
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), *places], env=env, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["6.0\n" * 3] * 2


def test_a_name_may_mean_something_else_on_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """``127.0.1.1`` here, by Debian's ``/etc/hosts``, and the network's address there."""
    rank_0 = socket.gethostname()
    monkeypatch.setattr(distributed_utils, "listen_on", lambda host, port: pytest.fail(f"only on {host}"))
    port = free_port("127.0.0.1")
    store, _, _ = open_store(f"tcp://{rank_0}:{port}", 0, 1, timedelta(seconds=5))
    store.set("key", "value")
    assert store.get("key") == b"value"
