"""A whole run of agents on a host with other users: every socket, process and file of it, as a stranger finds them."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from slime.agent.sandbox import LocalSandbox
from slime.servers.engine_client import EngineClient
from slime.servers.http import EngineError
from tests.support.run_train import Run, command_line, read_metric, rl_flags, sums_file
from tests.support.sockets import PROBE, Listener, is_tcp_store, listeners
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration

STRANGER = 700_123
KEY, ADMIN = "the-key-of-the-run", "the-second-key-of-the-run"
SECRETS = {"WANDB_API_KEY": "key-of-wandb", "OPENAI_API_KEY": "key-of-a-judge", "JUDGE_TOKEN": "token-of-a-judge"}
ENGINE = (
    "POST /generate", "POST /v1/chat/completions", "POST /abort_request", "POST /flush_cache", "GET /server_info",
    "POST /update_weights_from_tensor", "POST /update_weights_from_disk", "POST /update_weight_version", "GET /metrics",
    "POST /load_lora_adapter_from_tensors", "GET /get_weights_by_name", "POST /pause_generation", "GET /v1/loads",
)  # fmt: skip
ROUTER = (
    "POST /generate", "POST /v1/chat/completions", "GET /workers", "POST /workers", "DELETE /workers/x",
    "GET /get_loads", "POST /flush_cache", "POST /start_profile",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run that has pushed weights, which is when all of its sockets are there. Ctrl-C ends everything."""
    tmp_path = tmp_path_factory.mktemp("security")
    flags = rl_flags(make_tiny_checkpoint(tmp_path / "model"), sums_file(tmp_path / "sums.jsonl"))
    flags.remove("--apply-chat-template")  # the gateway applies it, turn by turn
    more = """--num-rollout 100000 --rm-url http://user:password-in-a-url@judge/x
        --custom-generate-function-path tests.support.agent_hooks.two_turns"""
    keys = {"SLIME_SGLANG_API_KEY": KEY, "SLIME_SGLANG_ADMIN_API_KEY": ADMIN, **SECRETS}
    with Run([*flags, *more.split(), "--wandb-key", "key-in-a-flag"], tmp_path / "run", env=keys) as run:
        run.wait_for(r"rollout 2 of ", 480.0)
        yield run
        os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does
        run.finish_after_signal(120.0, 130)


@pytest.fixture(scope="module")
def sockets(run: Run) -> dict[str, list[Listener]]:
    """The listening sockets of the run by what owns them. One that is of no kind fails."""
    kinds: dict[str, list[Listener]] = {"engine": [], "router": [], "manager": [], "ray": [], "gloo": []}
    pids = [*run.processes(), run.process.pid]
    for found in sorted(listeners(pids)):
        line = command_line(found.pid)
        if f"--port={found.port} " in line + " " or f"--port {found.port} " in line + " ":
            kind = "engine" if "sglang" in line else "ray"
        elif "router" in line and "supervise" not in line:
            kind = "router"
        elif "TrainRayActor" in line or "sglang" in line:
            kind = "gloo"
        elif "RolloutManager" in line:
            kind = "manager"
        else:
            kind = "ray"
            assert any(word in line for word in ("gcs_server", "raylet", "ray::", "/ray/", "train.py")), (found, line)
        kinds[kind].append(found)
    return kinds


def as_a_stranger(requests: list[str]) -> list[str]:
    asked = subprocess.run(
        ["bash", "-c", PROBE], input="\n".join(requests) + "\n", capture_output=True, text=True, errors="replace",
        user=STRANGER, group=STRANGER, extra_groups=[], cwd="/", env={"PATH": os.environ["PATH"]}, timeout=300,
        check=True,
    )  # fmt: skip
    return asked.stdout.splitlines()


def from_a_sandbox(requests: list[str]) -> list[str]:
    async def ask() -> str:
        async with LocalSandbox() as sandbox:
            await sandbox.write_file("/workspace/probe.sh", PROBE)
            await sandbox.write_file("/workspace/requests", "\n".join(requests) + "\n")
            _, out, _ = await sandbox.exec("bash probe.sh < requests", timeout=300)
            return out

    return asyncio.run(ask()).splitlines()


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
@pytest.mark.parametrize("ask", [as_a_stranger, from_a_sandbox])
def test_servers_refuse_whoever_has_no_key(sockets: dict[str, list[Listener]], ask: Any) -> None:
    (engine,) = sockets["engine"]
    assert sockets["router"]
    requests = [f"{engine.port} {request}" for request in ENGINE]
    requests += [f"{router.port} {request}" for router in sockets["router"] for request in ROUTER]
    replies = ask(requests)
    assert len(replies) == len(requests)
    router_ports = {str(router.port) for router in sockets["router"]}
    for reply in replies:
        port, _, _, *status = reply.split()
        if port in router_ports and "404" in status:
            continue  # its own port for counters has no such paths
        assert "401" in status or "405" in status, reply
    assert "200" in ask([f"{engine.port} GET /health"])[0]


def test_the_gateway_of_the_agents_refuses_whoever_has_no_session(sockets: dict[str, list[Listener]]) -> None:
    requests = [f"{port} POST /v1/chat/completions" for _, _, port in sockets["manager"]]
    spoken = [reply for reply in as_a_stranger(requests) if "HTTP/1.1" in reply]  # Ray's workers listen for gRPC
    assert len(spoken) == 1
    assert "401" in spoken[0].split(), spoken


def test_the_trainer_finds_the_log_probs_of_both_turns(run: Run) -> None:
    differences = read_metric(run.run_dir, "train/train_rollout_logprob_abs_diff")
    assert differences
    assert max(differences.values()) <= 1e-5
    assert set(read_metric(run.run_dir, "agent/trained_token_share").values()) == {1.0}


def test_the_second_key_is_for_weights(sockets: dict[str, list[Listener]]) -> None:
    (engine,) = sockets["engine"]
    url = f"http://127.0.0.1:{engine.port}"
    shown = str(EngineClient(url, KEY).server_info())
    assert KEY not in shown
    assert ADMIN not in shown
    with pytest.raises(EngineError, match="401"):
        EngineClient(url, KEY).update_weight_version("666")
    EngineClient(url, KEY).abort("no such request")
    EngineClient(url, KEY, admin_api_key=ADMIN).weights_checksum()


def test_nothing_listens_beyond_loopback_and_no_store_does(sockets: dict[str, list[Listener]]) -> None:
    found = [listener for kind in sockets.values() for listener in kind]
    assert {listener.address for listener in found} <= {"127.0.0.1", "::1"}, found
    assert [listener for listener in found if is_tcp_store(listener.port)] == []


def test_the_probe_knows_a_store() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    assert is_tcp_store(store.port)


def test_only_the_driver_has_the_secrets_in_its_environment(run: Run) -> None:
    secret = [value.encode() for value in (*SECRETS.values(), KEY, ADMIN)]
    for pid in run.processes():
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        assert not any(value in environ for value in secret), command_line(pid)


def test_no_command_line_shows_a_secret(run: Run) -> None:
    for pid in [*run.processes(), run.process.pid]:
        line = command_line(pid)
        for value in (KEY, ADMIN, *SECRETS.values(), "password-in-a-url", "key-in-a-flag"):
            assert value not in line, line


def test_no_file_of_the_run_holds_a_secret_or_can_be_read_by_others(run: Run) -> None:
    assert stat.S_IMODE(run.run_dir.stat().st_mode) == 0o700
    for path in run.run_dir.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            for value in (KEY, ADMIN, *SECRETS.values(), "password-in-a-url", "key-in-a-flag"):
                assert value.encode() not in content, path
    for name in ("config.yaml", "command.txt", "logs/rollout_manager.log", "logs/engine_0.log", "samples/0.jsonl"):
        assert stat.S_IMODE((run.run_dir / name).stat().st_mode) == 0o600, name


def test_rays_files_are_private(run: Run) -> None:
    raylet = next(pid for pid in run.processes() if "raylet" in command_line(pid))
    words = [word for word in command_line(raylet).split() if "/session_" in word]
    assert words
    for word in words:
        directory = Path(word.partition("=")[2].partition("/session_")[0] or word.partition("/session_")[0])
        assert any(stat.S_IMODE(p.stat().st_mode) == 0o700 for p in [directory, *directory.parents]), word
    token = Path.home() / ".ray" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
