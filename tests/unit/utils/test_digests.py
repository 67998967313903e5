"""Every bit of what a run loads counts: digests, sealed objects, the tracker."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import xxhash

from slime.utils import checkpoint_tracker, digests
from slime.utils.checkpoint_tracker import NOTE, TRACKER
from slime.utils.digests import DamagedFile, seal, unseal

STATE = json.dumps({"format": 2, "metadata": {"text": 'é ", "digest'}, "buffer": []}).encode()


def flips(content: bytes) -> list[bytes]:
    """Return ``content`` with each of its bits changed in turn."""
    return [
        content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
        for at in range(len(content))
        for bit in range(8)
    ]


def test_a_sealed_object_is_json_that_unseals_to_itself() -> None:
    sealed = seal(STATE, "x")
    assert json.loads(STATE).items() <= json.loads(sealed).items()
    assert unseal(sealed, "x", Path("file")) == STATE
    assert unseal(STATE, "x", Path("file")) == STATE  # what slime <= 0.3.1 wrote
    for edited in (
        STATE + b"\n",
        b"\n " + STATE + b" \r\n\n",
        json.dumps(json.loads(STATE), indent=2).encode() + b"\n",
    ):
        assert unseal(edited, "x", Path("file")) == edited
    assert json.loads(seal(b"{}", "x")).keys() == {"sealed", "digest"}
    assert unseal(seal(b"{}", "x"), "x", Path("file")) == b"{}"


def test_every_bit_and_every_length_of_a_sealed_object_counts() -> None:
    sealed = seal(STATE, "x")
    for changed in [*flips(sealed), *(sealed[:n] for n in range(len(sealed))), sealed + b"\n", sealed + sealed]:
        with pytest.raises(DamagedFile, match=r"state_9\.json is damaged"):
            unseal(changed, "x", Path("state_9.json"))
    with pytest.raises(DamagedFile, match="something else than y"):
        unseal(sealed, "y", Path("state_9.json"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    directory = tmp_path / "iter_0000003.writing"
    (directory / "adapter").mkdir(parents=True)
    for name in ("common.pt", ".metadata", "adapter/x"):
        (directory / name).write_bytes(name.encode() * 3)
    found = {name: digests.digest(directory / name) for name in ("common.pt", ".metadata", "adapter/x")}
    assert found["common.pt"] == xxhash.xxh3_128(b"common.pt" * 3).hexdigest()
    digests.write(directory, found, ["rollout/state_3.json"])
    return directory.rename(tmp_path / "iter_0000003")


def compare(directory: Path) -> None:
    listed = digests.read(directory)
    assert listed is not None
    digests.check(directory, listed.files, listed.files)


def test_every_bit_of_every_file_counts(folder: Path) -> None:
    compare(folder)
    for name in (digests.FILE, "common.pt", ".metadata", "adapter/x"):
        content = (folder / name).read_bytes()
        for changed in [*flips(content)[::5], content[:-1], b"", content + b"x"]:
            (folder / name).write_bytes(changed)
            with pytest.raises(DamagedFile, match=f"{folder / name} "):
                compare(folder)
        (folder / name).write_bytes(content)
        compare(folder)


def test_a_list_of_digests_that_is_not_sealed_is_none(folder: Path) -> None:
    path = folder / digests.FILE
    plain = unseal(path.read_bytes(), "digests", path)
    for content in (plain, plain + b"\n"):
        path.write_bytes(content)
        with pytest.raises(DamagedFile, match="it is no list of digests"):
            digests.read(folder)


def test_files_that_are_gone_or_of_another_checkpoint(folder: Path, tmp_path: Path) -> None:
    assert digests.read(tmp_path) is None
    shutil.copytree(folder, tmp_path / "iter_0000004")
    with pytest.raises(DamagedFile, match=r"iter_0000004/digests.json is of iter_0000003"):
        compare(tmp_path / "iter_0000004")
    compare((tmp_path / "iter_0000004").rename(tmp_path / "release"))
    (folder / "adapter/x").unlink()
    with pytest.raises(DamagedFile, match="adapter/x cannot be read: No such file"):
        compare(folder)


def damage(path: Path, content: bytes) -> None:
    """Change what ``path`` holds as a disk does: its time stays."""
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_every_bit_of_the_tracker_counts(tmp_path: Path) -> None:
    for iteration in (8, 9):
        (tmp_path / f"iter_000000{iteration}").mkdir()
        checkpoint_tracker.write(tmp_path, f"{iteration}\n")
    assert checkpoint_tracker.read(tmp_path) == 9
    for changed in [*flips(b"9\n"), b"", b"9", b"8\n"]:
        damage(tmp_path / TRACKER, changed)
        with pytest.raises(DamagedFile, match=rf"{TRACKER} holds .*iter_0000008, iter_0000009.*--ckpt-step.*{NOTE}"):
            checkpoint_tracker.read(tmp_path)
    damage(tmp_path / TRACKER, b"9\n")
    note = (tmp_path / NOTE).read_bytes()
    for changed in [*flips(note), b"", note[:-1]]:
        damage(tmp_path / NOTE, changed)
        with pytest.raises(DamagedFile, match=NOTE):
            checkpoint_tracker.read(tmp_path)
    (tmp_path / NOTE).write_bytes(note)
    (tmp_path / TRACKER).unlink()
    with pytest.raises(DamagedFile, match=rf"{TRACKER} is gone"):
        checkpoint_tracker.check_absence(tmp_path)
    (tmp_path / NOTE).unlink()
    checkpoint_tracker.check_absence(tmp_path)


def test_a_tracker_that_another_program_wrote(tmp_path: Path) -> None:
    checkpoint_tracker.check_absence(tmp_path)
    for text, iteration in (("12", 12), ("release\n", None)):
        (tmp_path / TRACKER).write_text(text)
        assert checkpoint_tracker.read(tmp_path) == iteration
    (tmp_path / TRACKER).write_text("lost")
    with pytest.raises(DamagedFile, match="should hold an iteration number or 'release', but holds 'lost'"):
        checkpoint_tracker.read(tmp_path)


def test_another_program_may_continue_the_tracker(tmp_path: Path) -> None:
    checkpoint_tracker.write(tmp_path, "9\n")
    time.sleep(0.02)  # more than a tick of the file system's clock
    (tmp_path / TRACKER).write_text("12")
    assert checkpoint_tracker.read(tmp_path) == 12
    checkpoint_tracker.write(tmp_path, "13\n")
    assert checkpoint_tracker.read(tmp_path) == 13
    damage(tmp_path / TRACKER, b"12\n")
    with pytest.raises(DamagedFile, match="is not what the last save wrote"):
        checkpoint_tracker.read(tmp_path)


@pytest.mark.parametrize("before", [None, 8])
def test_killed_at_any_step_of_writing_the_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int | None
) -> None:
    real = os.replace
    for steps in range(4):
        root = tmp_path / str(steps)
        root.mkdir()
        if before is not None:
            checkpoint_tracker.write(root, f"{before}\n")
        done = 0

        def replace(a: object, b: object, limit: int = steps) -> None:
            nonlocal done
            if done == limit:
                raise KeyboardInterrupt
            done += 1
            real(a, b)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            try:
                checkpoint_tracker.write(root, "9\n")
            except KeyboardInterrupt:
                assert steps < 3
        if (root / TRACKER).exists():
            assert checkpoint_tracker.read(root) == (9 if steps > 1 else before)
            written = (root / TRACKER).read_bytes()
            damage(root / TRACKER, b"7\n")
            with pytest.raises(DamagedFile):
                checkpoint_tracker.read(root)
            damage(root / TRACKER, written)
        else:
            assert before is None
            checkpoint_tracker.check_absence(root)
        checkpoint_tracker.write(root, "10\n")
        assert checkpoint_tracker.read(root) == 10
