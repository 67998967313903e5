"""Digests of checkpoints: what fails on one rank is said by all, and no file is read twice without need."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from slime.backends.megatron_utils.checkpoints.digests import WAY_BACK_OF_HF, check_files, write_digests
from slime.utils import digests
from tests.support.distributed import run_distributed


@pytest.fixture
def export(tmp_path: Path) -> Path:
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (tmp_path / name).write_text(name)
    write_digests(tmp_path, pattern="*.safetensors")
    return tmp_path


def test_an_export_that_was_changed_on_purpose_has_a_way_back(export: Path) -> None:
    (export / "model-1.safetensors").write_text("quantized")
    with pytest.raises(ValueError, match=r"model-1.*; if you changed its weights, remove its digests\.json$"):
        check_files(export, WAY_BACK_OF_HF)
    (export / "digests.json").unlink()
    assert not check_files(export, WAY_BACK_OF_HF)


def test_a_file_is_read_once_until_it_is_written_again(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    digest = digests.digest

    def noted(path: Path) -> str:
        read.append(path.name)
        return digest(path)

    monkeypatch.setattr(digests, "digest", noted)
    monkeypatch.chdir(export)
    for directory in (export, Path("."), export):
        assert check_files(directory)
    assert sorted(read) == ["model-1.safetensors", "model-2.safetensors"]
    first = export / "model-1.safetensors"
    before = first.stat()
    time.sleep(0.02)  # more than a tick of the file system's clock
    first.write_text("MODEL-1.safetensors")
    os.utime(first, ns=(before.st_atime_ns, before.st_mtime_ns))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"model-1\.safetensors is damaged"):
            check_files(export)
    write_digests(export, pattern="*.safetensors")
    read.clear()
    assert check_files(export)
    assert read == ["model-1.safetensors"]


def test_a_directory_that_cannot_be_listed_is_said_on_all_ranks(tmp_path: Path) -> None:
    target = "tests.unit.backends.megatron_utils.digest_ranks:write_where_nothing_is_listed"
    for said in run_distributed(target, 2, {"folder": str(tmp_path)}, timeout=60):
        assert said.startswith(f"{tmp_path} cannot be read back: ")
        assert "Stale file handle" in said
