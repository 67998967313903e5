"""Files that Ray writes on a host that others use too."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.ray import cluster
from slime.ray.cluster import make_token_private, private_directory, secrets_of_users


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as directory:
        monkeypatch.setenv("RAY_TMPDIR", directory)
        yield Path(directory)


def test_the_directory_of_ray_is_private_and_used_again(parent: Path) -> None:
    found = private_directory()
    assert found == parent / f"slime-ray-{os.getuid()}"
    assert mode(found) == 0o700
    found.chmod(0o777)
    assert private_directory() == found
    assert mode(found) == 0o700


def test_a_place_that_somebody_else_has_taken_is_not_used(parent: Path, tmp_path: Path) -> None:
    taken = parent / f"slime-ray-{os.getuid()}"
    elsewhere = tmp_path / "of somebody else"
    elsewhere.mkdir(mode=0o755)
    taken.symlink_to(elsewhere)
    found = private_directory()
    assert found.parent == parent
    assert found != taken
    assert mode(found) == 0o700
    assert mode(elsewhere) == 0o755


def test_a_directory_of_another_user_is_not_used(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4_000_001)  # what is made belongs to somebody else
    found = private_directory()
    assert found.name != "slime-ray-4000001"
    assert mode(found) == 0o700


def test_sockets_have_short_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/a/directory/with/a/very/long/name/for/temporary/files")
    socket = "/ray/session_2026-11-26_23-10-49_123456_1234567/sockets/plasma_store.00000"
    assert len(f"{private_directory()}{socket}") <= 107


@pytest.mark.parametrize("length", range(20, 40))
def test_a_parent_that_leaves_room_for_sockets_is_taken(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    parent = f"/tmp/{'x' * (length - 5)}"
    monkeypatch.setenv("RAY_TMPDIR", parent)
    monkeypatch.setattr(Path, "mkdir", lambda self, **how: None)
    monkeypatch.setattr(Path, "lstat", lambda self: os.stat("/tmp"))
    monkeypatch.setattr(Path, "chmod", lambda self, mode: None)
    found = str(private_directory())
    socket = "/ray/session_2026-11-26_23-10-49_123456_4194304/sockets/plasma_store"
    assert len(found + socket) <= 107
    assert found.startswith(f"{parent}/") == (length + len("/slime-ray-12345678" + socket) <= 107)


@pytest.mark.parametrize("there", [True, False])
def test_the_token_is_private(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".ray" / "auth_token"
    if there:
        file.parent.mkdir()
        file.write_text("mine")
        file.chmod(0o644)
    make_token_private()
    token = file.read_text()
    assert (token == "mine") is there
    assert len(token) == 64 or there
    assert mode(file) == 0o600
    make_token_private()
    assert file.read_text() == token
    assert [path.name for path in file.parent.iterdir()] == ["auth_token"]


def test_processes_of_ray_inherit_no_secrets_and_users_functions_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "of-the-tracker")
    monkeypatch.setenv("OPENAI_API_KEY", "of-a-judge")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-ray")
    with cluster._without_secrets():
        inherited = dict(os.environ)
    assert "WANDB_API_KEY" not in inherited
    assert "OPENAI_API_KEY" not in inherited
    assert inherited["RAY_AUTH_TOKEN"] == "of-ray"
    assert os.environ["WANDB_API_KEY"] == "of-the-tracker"
    given = secrets_of_users()
    assert given["OPENAI_API_KEY"] == "of-a-judge"
    assert not {"WANDB_API_KEY", "RAY_AUTH_TOKEN", "PATH"} & given.keys()
