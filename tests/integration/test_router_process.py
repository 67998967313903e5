"""Routers that fail, collide and stop. Their work with an engine: ``test_engine_control.py``."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from slime.backends.sglang_utils import router as router_module
from slime.backends.sglang_utils.errors import RouterStartError
from slime.backends.sglang_utils.ports import reserve_ports
from slime.backends.sglang_utils.router import RouterProcess
from tests.support.engines import engine_args

pytestmark = pytest.mark.integration


def test_a_router_that_cannot_start_says_why(tmp_path: Path) -> None:
    args = engine_args("none", router_backend="no_such_backend")
    router = RouterProcess(args, "127.0.0.1", log_path=tmp_path / "router.log")
    router.start()
    with pytest.raises(RouterStartError, match=r"(?s)router .* exited with code.*Last lines of.*no_such_backend"):
        router.wait_ready(60)
    assert router.poll() is not None


def test_a_router_whose_port_is_taken_starts_on_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``smg``, for the policy that only it has."""
    pytest.importorskip("smg")
    args = engine_args("none", router_policy="consistent_hashing")
    with socket.create_server(("127.0.0.1", reserve_ports(1)[0])) as squatter:
        taken = squatter.getsockname()[1]
        choices = iter([[taken]])
        monkeypatch.setattr(router_module, "reserve_ports", lambda n: next(choices, None) or reserve_ports(n))
        router = RouterProcess(args, "127.0.0.1", log_path=tmp_path / "router.log")
        try:
            assert router.package == "smg"
            router.start()
            router.wait_ready(60)
            assert router.port != taken
            assert router.poll() is None
        finally:
            router.stop()
    assert router.poll() is not None
