"""Files that appear whole or not at all, whatever happens in between."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime.utils import atomic_file
from slime.utils.atomic_file import replacing, write_atomically


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("content", ["é\r\nline\n", b"\x00\xff", ""])
def test_content_arrives_as_it_is_in_new_directories_too(tmp_path: Path, content: str | bytes, durable: bool) -> None:
    path = tmp_path / "a" / "b" / "file"
    write_atomically(path, "before")
    write_atomically(str(path), content, durable=durable)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert os.listdir(path.parent) == ["file"]


def fail_halfway(path: Path, error: Exception) -> None:
    with replacing(path) as temporary:
        temporary.write_text("half")
        raise error


def test_an_exception_leaves_the_old_content_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "before")
    with pytest.raises(KeyError):
        fail_halfway(path, KeyError("stop"))
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_is_named_with_the_space_left(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "before")
    message = rf"{path}: cannot be written: No space left on device \(\d+ MiB are free there\)"
    with pytest.raises(OSError, match=message):
        fail_halfway(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"below: cannot be written: [^(]*$"):
        write_atomically(tmp_path / "file" / "below", "x")


def test_durable_content_is_synced_before_it_gets_its_name_and_the_name_after(tmp_path: Path, monkeypatch) -> None:
    steps: list[str] = []
    replace = os.replace
    monkeypatch.setattr(atomic_file, "sync", lambda path: steps.append(f"sync {'dir' if path.is_dir() else 'file'}"))
    monkeypatch.setattr(atomic_file.os, "replace", lambda a, b: (steps.append("replace"), replace(a, b)))
    write_atomically(tmp_path / "file", "x", durable=True)
    write_atomically(tmp_path / "file", "y")
    assert steps == ["sync file", "replace", "sync dir", "replace"]


def test_a_reader_beside_many_writers_never_sees_a_part(tmp_path: Path) -> None:
    path = tmp_path / "file"
    code = (
        "import sys; from slime.utils.atomic_file import write_atomically\n"
        "for _ in range(60): write_atomically(sys.argv[1], sys.argv[2] * 50000)"
    )
    write_atomically(path, "a" * 50000)
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), letter]) for letter in "ab"]
    while any(writer.poll() is None for writer in writers):
        text = path.read_text()
        assert text in ("a" * 50000, "b" * 50000)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert os.listdir(tmp_path) == ["file"]
