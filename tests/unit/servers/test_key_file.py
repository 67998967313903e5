"""The key that the programs of one user share: made once, readable by that user alone, sent to this host only."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slime.servers import key_file
from slime.servers.auth import bearer_token, is_key
from slime.servers.key_file import KEY_VARIABLE, key_for, shared_key


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_it_is_made_once_and_only_its_user_reads_it(home):
    before = os.umask(0)
    try:
        with ThreadPoolExecutor(8) as threads:
            keys = set(threads.map(lambda _: shared_key(), range(32)))
    finally:
        os.umask(before)
    [key] = keys
    assert len(key) >= 32
    assert stat.S_IMODE((home / ".slime").stat().st_mode) == 0o700
    assert stat.S_IMODE((home / ".slime/key").stat().st_mode) == 0o600
    assert os.listdir(home / ".slime") == ["key"]


def test_that_of_the_environment_is_the_first(home, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "mine")
    assert (shared_key(), key_for("http://10.0.0.7:8889"), key_for("http://localhost:1")) == ("mine", "mine", "mine")
    assert not (home / ".slime").exists()


@pytest.mark.parametrize("url", ["http://10.0.0.7:8889", "http://example.org", "http://127.0.0.1.example.org:1", "x"])
def test_the_users_own_key_stays_on_this_host(home, url):
    assert key_for(url) is None
    assert key_for("http://127.0.0.1:8889") == key_for("http://[::1]:8889") == shared_key()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o666])
def test_a_key_that_others_may_know_is_refused(home, mode):
    shared_key()
    (home / ".slime/key").chmod(mode)
    with pytest.raises(PermissionError, match=r"others|alone"):
        shared_key()


def test_links_and_empty_files_are_refused(home):
    (home / ".slime").mkdir(mode=0o700)
    (home / "elsewhere").write_text("key of another")
    (home / ".slime/key").symlink_to(home / "elsewhere")
    with pytest.raises(PermissionError, match="remove it"):
        shared_key()
    (home / ".slime/key").unlink()
    (home / ".slime/key").touch(0o600)
    with pytest.raises(PermissionError, match="is empty"):
        shared_key()


def test_a_directory_that_others_write_is_refused(home):
    (home / ".slime").mkdir()
    (home / ".slime").chmod(0o777)
    with pytest.raises(PermissionError, match="not this user's alone"):
        shared_key()


def test_without_a_home_it_is_beside_temporary_files(home, tmp_path_factory, monkeypatch):
    there = tmp_path_factory.mktemp("tmp")
    monkeypatch.setattr(key_file.tempfile, "gettempdir", lambda: str(there))
    monkeypatch.setenv("HOME", str(home / "absent"))
    key = shared_key()
    assert (there / f"slime-{os.getuid()}/key").read_text().strip() == key == shared_key()


@pytest.mark.parametrize(
    ("given", "right"), [("key", True), ("kez", False), ("key ", False), ("", False), (None, False), ("\udcff", False)]
)
def test_keys_are_compared_whatever_is_sent(given, right):
    assert is_key(given, "key") is right


@pytest.mark.parametrize(
    ("header", "token"),
    [("Bearer a", "a"), ("bearer  a", "a"), ("Basic a", None), ("Bearer", None), ("", None), (None, None), ("a", None)],
)
def test_the_token_of_a_header(header, token):
    assert bearer_token(header) == token
