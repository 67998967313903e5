"""Services are asked once before a run: the server of a reward, and what the environments' ``check`` asks."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from slime.preflight.look import Findings, hooks
from slime.rollout.environments import Environment
from tests.support.arguments import run_args

HERE = f"{__name__}."
ASKED: list[Any] = []


class Plain(Environment):
    @classmethod
    def check(cls, args: Any, options: Any) -> None:
        ASKED.append((cls.__name__, args.rm_type))


class Refused(Environment):
    @staticmethod
    async def check(args: Any, options: Any) -> None:
        raise ConnectionRefusedError("no judge at port 9")


class Slow(Environment):
    @classmethod
    async def check(cls, args: Any, options: Any) -> None:
        import asyncio

        await asyncio.sleep(60)


class AnotherThing(Environment):
    def check(self, answer: str) -> bool:  # type: ignore[override]
        raise AssertionError("it is not about services")


def found(dry_run: bool = False, **overrides: Any) -> Findings:
    findings = Findings()
    hooks.look_at_services(run_args(**overrides), dry_run, findings)
    return findings


def environment(name: str, dry_run: bool = False) -> Findings:
    return found(dry_run, environment_path=[HERE + name])


def test_the_checks_of_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "DEADLINE_S", 0.2)
    ASKED.clear()
    assert environment("Plain").errors == environment("AnotherThing").errors == []
    assert ASKED == [("Plain", None)]
    (refused,) = environment("Refused").errors
    assert refused.startswith("environment 'Refused': its check raised ConnectionRefusedError: no judge at port 9, at ")
    assert 'raise ConnectionRefusedError("no judge at port 9")' in refused
    assert environment("Slow").errors == ["environment 'Slow': its check took more than 0.2 s"]


def test_a_dry_run_asks_nothing_and_says_so() -> None:
    assert environment("Refused", dry_run=True).errors == []
    assert environment("Refused", dry_run=True).unchecked == ["environment 'Refused': its check is made before a run"]
    said = found(True, rm_type="remote_rm", rm_url="http://127.0.0.1:9/x")
    assert (said.warnings, said.unchecked) == ([], ["whether http://127.0.0.1:9/x answers (--rm-url)"])


def test_the_server_of_a_reward() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/score"
        assert found(rm_type="remote_rm", rm_url=url).warnings == []
    for kind in ("remote_rm", "boxed_remote_rm"):
        (said,) = found(rm_type=kind, rm_url=url).warnings
        assert said.startswith(f"--rm-url {url} takes no connection (")
        assert "--service-outage-timeout 1800 s" in said
    assert found(rm_type="math", rm_url=url).warnings == []
    assert found(rm_type="remote_rm", rm_url=url, custom_rm_path="a.b").warnings == []
    assert len(found(rm_type="remote_rm", rm_url="http://127.0.0.1:99999/").warnings) == 1
    assert found(rm_type="remote_rm", rm_url=url, debug_train_only=True).warnings == []
