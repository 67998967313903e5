"""The keys of a run, and how they are compared."""

from __future__ import annotations

import os

import pytest

from slime.arguments import ArgumentError
from slime.servers.auth import bearer_token, ensure_api_key, is_key, is_loopback
from slime.servers.engine_client import EngineClient
from slime.servers.types import EngineInfo
from tests.support.arguments import parse, run_args


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "localhost", "::1", "[::1]"])
def test_loopback_is_known(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.0.0.4", "0.0.0.0", "fd00::2", "node-7", None])
def test_every_run_has_two_keys_that_are_made_once(host: str | None) -> None:
    args = run_args()
    key = ensure_api_key(args, host)
    assert len(key) >= 32
    assert len(args.sglang_admin_api_key) >= 32
    assert args.sglang_admin_api_key != key
    made = key, args.sglang_admin_api_key
    assert ensure_api_key(args, host) == key == args.sglang_api_key
    assert made == (args.sglang_api_key, args.sglang_admin_api_key)
    assert ensure_api_key(run_args(), host) != key


def test_a_key_that_is_made_is_no_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang reads it as a word of a command line."""
    monkeypatch.setattr(os, "urandom", lambda size: b"\xfb" * size)  # "-" in base64
    assert not ensure_api_key(run_args()).startswith("-")


@pytest.mark.parametrize("name", ["sglang_api_key", "sglang_admin_api_key"])
@pytest.mark.parametrize("key", ["-key", "a key", "clé", "key\n", "\x7f"])
@pytest.mark.parametrize("by_flag", [True, False])
def test_a_key_that_cannot_be_sent_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, key: str, by_flag: bool
) -> None:
    flag = f"--{name.replace('_', '-')}"
    if not by_flag:
        monkeypatch.setenv(f"SLIME_{name.upper()}", key)
    with pytest.raises(ArgumentError, match=rf"{flag} \(SLIME_{name.upper()} in the .*: expected printable ASCII"):
        parse(*([f"{flag}={key}"] if by_flag else []))


def test_keys_of_the_user_stay() -> None:
    args = run_args(sglang_api_key="mine", sglang_admin_api_key="mine too")
    assert ensure_api_key(args) == "mine"
    assert args.sglang_admin_api_key == "mine too"


def test_a_key_does_not_show_in_what_is_logged() -> None:
    info = EngineInfo("http://10.0.0.4:15000", api_key="s3cret", admin_api_key="s3cret too")
    assert "s3cret" not in repr(info)


def test_a_client_has_the_keys_of_its_engine() -> None:
    client = EngineClient.of(EngineInfo("http://127.0.0.1:1", api_key="one", admin_api_key="two"), 5.0)
    assert client._http._headers == {"Authorization": "Bearer one"}
    assert client._control._headers == {"Authorization": "Bearer two"}
    assert EngineClient("http://127.0.0.1:1", "one")._control._headers == {"Authorization": "Bearer one"}
    assert EngineClient("http://127.0.0.1:1")._control._headers == {}


@pytest.mark.parametrize(
    ("header", "token"),
    [("Bearer k", "k"), ("bearer  k ", "k"), ("Bearer", None), ("Bearer ", None), ("", None), (None, None),
     ("Basic k", None), ("k", None)],
)  # fmt: skip
def test_a_bearer_token_is_read(header: str | None, token: str | None) -> None:
    assert bearer_token(header) == token


def test_keys_are_compared_whatever_they_hold() -> None:
    assert is_key("key", "key")
    for given in (None, "", "ke", "keyy", "KEY", "k\udce9y", "kéy"):
        assert not is_key(given, "key")
