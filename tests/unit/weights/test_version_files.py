"""Copies of weight versions on engine hosts: verified, complete or absent, made once for all engines of a host."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from slime.utils.digests import digest
from slime.weights import versions as version_files
from slime.weights.versions import CorruptFileError, pull, version_dir


def written(root: Path, version: int, content: bytes = b"weights") -> Path:
    directory = version_dir(root, version)
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(content)
    (directory / "config.json").write_text("{}")
    version_files.write_checksums(directory, {p.name: digest(p) for p in sorted(directory.iterdir())})
    return directory


def test_names() -> None:
    assert version_dir("/d", 7) == Path("/d/weight_v000007")
    assert version_dir("/d", 12345678) == Path("/d/weight_v12345678")


def test_a_version_is_copied_and_older_ones_go(tmp_path: Path) -> None:
    shared, local = tmp_path / "shared", tmp_path / "local"
    pull(written(shared, 1), local)
    copy = pull(written(shared, 2, b"new weights"), local)
    assert copy == local / "weight_v000002"
    assert (copy / "model.safetensors").read_bytes() == b"new weights"
    assert [path.name for path in sorted(local.glob("weight_*"))] == ["weight_v000002"]


def test_a_changed_file_is_named_and_the_next_try_starts_afresh(tmp_path: Path) -> None:
    shared, local = tmp_path / "shared", tmp_path / "local"
    source = written(shared, 1)
    (source / "model.safetensors").write_bytes(b"weightz")
    with pytest.raises(CorruptFileError, match=r"model\.safetensors has xxh3-128 [0-9a-f]{32}, but was written with"):
        pull(source, local)
    assert not (local / "weight_v000001" / version_files.CHECKSUMS).exists()
    (source / "model.safetensors").write_bytes(b"weights")
    assert (pull(source, local) / "model.safetensors").read_bytes() == b"weights"


def test_the_same_number_of_another_run_is_no_copy_of_this_one(tmp_path: Path) -> None:
    local = tmp_path / "local"
    pull(written(tmp_path / "before", 1, b"before"), local)
    assert (pull(written(tmp_path / "now", 1, b"now"), local) / "model.safetensors").read_bytes() == b"now"


def test_engines_of_a_host_copy_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, local = written(tmp_path / "shared", 1), tmp_path / "local"
    copied: list[str] = []
    copy_file = version_files._copy_file

    def noting(source: Path, target: Path) -> str:
        copied.append(source.name)
        return copy_file(source, target)

    monkeypatch.setattr(version_files, "_copy_file", noting)
    threads = [threading.Thread(target=pull, args=(source, local)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(copied) == ["config.json", "model.safetensors"]


def test_a_host_that_does_not_see_the_directory_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--update-weight-disk-dir must be a directory that"):
        pull(tmp_path / "weight_v000001", tmp_path / "local")


def test_clearing_leaves_what_is_no_version(tmp_path: Path) -> None:
    kept = written(tmp_path, 3)
    mine = ["best_weight_v000001", "mine", "weight_v000001.backup", "weight_vX"]
    for name in ("weight_v000001", ".weight_v000002.staging", "..weight_v000002.staging.partial", *mine):
        (tmp_path / name).mkdir()
    version_files.clear(tmp_path, but=[kept])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*mine, "weight_v000003"])
    version_files.clear(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == mine
