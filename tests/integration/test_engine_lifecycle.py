"""Engines that fail, die, collide and stop, forked and as on a host with GPUs, without the fork server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slime.backends.sglang_utils import engine as engine_module
from slime.backends.sglang_utils.engine import EngineProcess
from slime.backends.sglang_utils.errors import EngineStartError
from slime.backends.sglang_utils.ports import reserve_ports
from slime.utils.process_supervisor import descendants, parents
from tests.support.engines import engine_args
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def new_engine(tmp_path: Path) -> Iterator[Callable[..., EngineProcess]]:
    engines: list[EngineProcess] = []

    def make(model: Path, **fields: object) -> EngineProcess:
        log_path = tmp_path / f"engine_{len(engines)}.log"
        engines.append(
            EngineProcess(engine_args(model, **fields), rank=len(engines), host="127.0.0.1", log_path=log_path)
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.stop()


def alive(pids: list[int]) -> list[int]:
    running = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            running.append(pid)
    return running


def mapped_shared_memory(pids: list[int]) -> set[str]:
    """Paths under /dev/shm that ``pids`` have mapped: other runs of the host come and go there too."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")}


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"{what} took more than {seconds} s"
        time.sleep(0.05)
    return time.monotonic() - started


def test_a_wrong_checkpoint_fails_with_the_engines_last_lines(
    new_engine: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    engine = new_engine(tmp_path / "no_such_model")
    engine.start()
    with pytest.raises(EngineStartError, match=r"exited with code") as caught:
        engine.wait_ready(120)
    message = str(caught.value)
    assert "no_such_model" in message
    assert "OSError" in message
    assert str(engine.log_path) in message
    assert "--hf-checkpoint" in message
    assert not alive([engine.pid or 0])


def test_a_deadline_that_passes_names_itself_and_ends_the_engine(
    new_engine: Callable[..., EngineProcess], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "fork_server_of_engines", lambda: None)  # one that is forked is ready by then
    engine = new_engine(checkpoint)
    engine.start()
    with pytest.raises(EngineStartError, match=r"not ready after 1 s \(--engine-ready-timeout\)"):
        engine.wait_ready(1)
    assert not alive([engine.pid or 0])


def test_a_taken_port_a_dead_scheduler_and_a_stop_that_leaves_nothing(
    new_engine: Callable[..., EngineProcess], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(checkpoint)
    # Another process takes the port between its choice and the engine's start.
    with socket.create_server(("127.0.0.1", reserve_ports(1)[0])) as squatter:
        taken = squatter.getsockname()[1]
        choices = iter([[taken, reserve_ports(1)[0]]])
        monkeypatch.setattr(engine_module, "reserve_ports", lambda n: next(choices, None) or reserve_ports(n))
        engine.start()
        assert engine.info.url.endswith(f":{taken}")
        engine.wait_ready(180)
    assert not engine.info.url.endswith(f":{taken}")
    client = engine.client()
    assert len(client.generate({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}})["output_ids"]) == 3

    # The scheduler dies: the server cannot serve any more, and says so.
    server = engine.pid or 0
    family = [server, *descendants(server)]
    assert len(family) >= 3
    scheduler = next(p for p in family[1:] if b"scheduler" in Path(f"/proc/{p}/cmdline").read_bytes())
    os.kill(scheduler, signal.SIGKILL)
    wait_for(engine.poll, 30, "noticing the dead scheduler")
    assert "Last lines of" in (engine.poll() or "")

    # It can be started again, and a stop leaves no process and no file.
    engine.stop()
    assert not alive(family)
    engine.start()
    engine.wait_ready(180)
    assert engine.poll() is None
    assert was_forked(engine)
    stop_without_a_trace(engine)


def test_an_engine_that_was_not_forked_leaves_nothing_either(
    new_engine: Callable[..., EngineProcess], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "fork_server_of_engines", lambda: None)
    engine = new_engine(checkpoint)
    engine.start()
    engine.wait_ready(180)
    assert not was_forked(engine)
    stop_without_a_trace(engine)


def was_forked(engine: EngineProcess) -> bool:
    """Return whether the parent of the engine's supervisor is the fork server."""
    grandparent = parents()[parents()[engine.pid or 0]]
    return b"fork server" in Path(f"/proc/{grandparent}/cmdline").read_bytes()


def stop_without_a_trace(engine: EngineProcess) -> None:
    """Stop a running engine: within seconds no process of it is left, and no file."""
    assert engine._scratch is not None
    scratch = engine._scratch.path
    server = engine.pid or 0
    family = [server, *descendants(server)]
    shared_memory = mapped_shared_memory(family)
    assert [path for path in shared_memory if scratch.name in path], shared_memory
    assert scratch.is_dir()
    started = time.monotonic()
    engine.stop()
    assert time.monotonic() - started < 5
    assert not alive(family)
    assert not scratch.exists()
    assert not [path for path in shared_memory if Path(path).exists()]
    engine.stop()  # once more does nothing


@pytest.mark.soak
def test_a_killed_server_is_noticed_and_its_children_end(
    new_engine: Callable[..., EngineProcess], checkpoint: Path
) -> None:
    engine = new_engine(checkpoint)
    engine.start()
    engine.wait_ready(180)
    server = engine.pid or 0
    family = [server, *descendants(server)]
    os.kill(server, signal.SIGKILL)
    assert wait_for(engine.poll, 10, "noticing the killed server") < 5
    ended = engine.poll() or ""
    assert "was ended by signal 9" in ended
    assert "The server is fired up" in ended
    wait_for(lambda: not alive(family), 10, "the end of the killed server's children")


def test_an_engine_ends_with_its_owner(checkpoint: Path, tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import time
        from slime.backends.sglang_utils.engine import EngineProcess
        from tests.support.engines import engine_args
        args = engine_args({str(checkpoint)!r})
        engine = EngineProcess(args, rank=0, host="127.0.0.1", log_path={str(tmp_path / "e.log")!r})
        engine.start()
        print(engine.pid, flush=True)
        time.sleep(600)
        """
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        server = int(owner.stdout.readline())
        time.sleep(1.0)
        family = [server, *descendants(server)]
        assert alive([server])
    finally:
        owner.kill()
        owner.wait(10)
        owner.stdout.close()
    wait_for(lambda: not alive(family), 30, "the end of the engine of a killed owner")
