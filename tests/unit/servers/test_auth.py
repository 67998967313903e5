"""When servers ask for a key."""

from __future__ import annotations

import pytest

from slime.servers.auth import ensure_api_key, is_loopback
from slime.servers.types import EngineInfo
from tests.support.arguments import run_args


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "localhost", "::1", "[::1]"])
def test_loopback_needs_no_key(host: str) -> None:
    args = run_args()
    assert is_loopback(host)
    assert ensure_api_key(args, host) is None
    assert args.sglang_api_key is None


@pytest.mark.parametrize("host", ["10.0.0.4", "0.0.0.0", "fd00::2", "node-7"])
def test_beyond_loopback_a_key_is_made_once(host: str) -> None:
    args = run_args()
    key = ensure_api_key(args, host)
    assert key is not None
    assert len(key) >= 32
    assert ensure_api_key(args, host) == key == args.sglang_api_key
    assert ensure_api_key(run_args(), host) != key


def test_a_key_of_the_user_stays() -> None:
    args = run_args(sglang_api_key="mine")
    assert ensure_api_key(args, "10.0.0.4") == "mine"


def test_a_key_does_not_show_in_what_is_logged() -> None:
    assert "s3cret" not in repr(EngineInfo("http://10.0.0.4:15000", api_key="s3cret"))
