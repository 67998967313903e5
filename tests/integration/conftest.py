"""Engines that a test starts itself are forked from one process, as those of a run are."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.backends.sglang_utils import engine, engine_forks
from slime.utils.secrets import public_environment


@pytest.fixture(scope="session", autouse=True)
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start the fork server with the first engine. It is not in the environment: a run has its own."""
    servers: list[subprocess.Popen[bytes]] = []
    path: Path = tmp_path_factory.mktemp("forks") / "socket"

    def socket_of_server() -> str:
        if not servers:
            servers.append(engine_forks.start_fork_server(str(path), public_environment(), takes_adapters=False))
        return str(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "fork_server_of_engines", socket_of_server)
        yield
    for server in servers:
        server.kill()
        server.wait(30)
