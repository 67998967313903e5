"""Both halves of a push through files: one trainer rank that writes a stand-in checkpoint, engines that note calls."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch.distributed as dist

from slime.servers.types import EngineInfo
from slime.weight_sync import files, resolve_pause_mode, steps
from slime.weight_sync.fanout import WeightSyncError
from slime.weights import versions as version_files
from tests.support.arguments import run_args

HOOKED: list[tuple[str, list[str]]] = []


def note(args: Any, version_dir: str, rollout_engines: list[EngineInfo]) -> None:
    HOOKED.append((version_dir, [engine.url for engine in rollout_engines]))


def fail(args: Any, version_dir: str, rollout_engines: list[EngineInfo]) -> None:
    raise OSError("the bucket is gone")


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def export(model: Any, args: Any, path: Path, *, quantizer: Any) -> None:
        path.mkdir()
        (path / "model.safetensors").write_text(str(model))

    monkeypatch.setattr(files, "export_hf", export)
    HOOKED.clear()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sync_args(folder: Path, **flags: Any) -> Namespace:
    given = {
        "update_weight_disk_dir": str(folder / "shared"),
        "custom_update_weight_post_write_path": f"{__name__}.note",
        "weight_sync_timeout": 10.0,
    }
    return run_args(**{**given, **flags})


def written(args: Namespace, version: int, weights: str = "weights") -> Path:
    return files.publish(args, SimpleNamespace(model=weights, args=args), version, [EngineInfo("http://a")])  # type: ignore[arg-type]


def test_a_version_is_complete_when_it_is_seen_and_the_hook_is_called(tmp_path: Path) -> None:
    args = sync_args(tmp_path)
    written(args, 1)
    directory = written(args, 2, "new weights")
    assert [path.name for path in directory.parent.iterdir()] == ["weight_v000002"]
    assert (directory / "model.safetensors").read_text() == "new weights"
    reported = [(str(tmp_path / "shared" / f"weight_v00000{n}"), ["http://a"]) for n in (1, 2)]
    assert reported == HOOKED
    assert not (directory / version_files.CHECKSUMS).exists()


def test_kept_versions_stay_and_the_same_number_is_written_again(tmp_path: Path) -> None:
    args = sync_args(tmp_path, update_weight_disk_keep_files=True)
    written(args, 1, "of an earlier run")
    written(args, 2)
    assert (written(args, 1, "of this run") / "model.safetensors").read_text() == "of this run"
    assert len(list((tmp_path / "shared").iterdir())) == 2


def test_a_hook_that_fails_is_named(tmp_path: Path) -> None:
    path = f"{__name__}.fail"
    with pytest.raises(WeightSyncError, match=rf"-post-write-path {path}: OSError: the bucket is gone"):
        written(sync_args(tmp_path, custom_update_weight_post_write_path=path), 1)


class Client:
    """Notes the calls of a push; knows the version that was loaded last."""

    log: ClassVar[list[str]] = []

    @classmethod
    def of(cls, info: EngineInfo, timeout: float) -> Client:
        return cls(info.url, info.api_key, timeout)

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        self.url, self.version = url, "0"

    def health(self, timeout: float) -> None:
        self.log.append("health")

    def pause(self, mode: str) -> None:
        self.log.append(f"pause {mode}")

    def flush_cache(self, deadline: float) -> None:
        self.log.append("flush")

    def update_weights_from_disk(self, path: str, *, flush_cache: bool, weight_version: str) -> None:
        assert not flush_cache  # it was flushed, and requests may wait
        assert (Path(path) / "model.safetensors").is_file()
        self.log.append(f"load {Path(path).parent.name}/{Path(path).name}")
        self.version = weight_version

    def weight_version(self) -> str:
        return self.version

    def resume(self) -> None:
        self.log.append("continue")


def load(args: Namespace, directory: Path, version: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    def pull(path: str, deadline: float) -> str:
        Client.log.append("copy")
        return str(version_files.pull(path, args.update_weight_local_checkpoint_dir))

    monkeypatch.setattr(Client, "log", [])
    monkeypatch.setattr(steps, "EngineClient", Client)
    member = SimpleNamespace(known_info=EngineInfo("http://a"), engine=SimpleNamespace(pull_weights=pull))
    pause_mode = resolve_pause_mode(args, synchronous_loop=False)
    steps.load_files(args, [member], str(directory), version, pause_mode=pause_mode)  # type: ignore[list-item]
    return Client.log


def test_engines_pause_flush_load_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = sync_args(tmp_path)
    log = load(args, written(args, 7), 7, monkeypatch)
    assert log == ["health", "pause retract", "flush", "load shared/weight_v000007", "continue"]


def test_a_copy_is_made_and_verified_before_engines_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = sync_args(tmp_path, update_weight_local_checkpoint_dir=str(tmp_path / "local"))
    directory = written(args, 7)
    log = load(args, directory, 7, monkeypatch)
    assert log == ["health", "copy", "pause retract", "flush", "load local/weight_v000007", "continue"]
    (directory / "model.safetensors").write_text("WEIGHTS")
    (tmp_path / "local" / "weight_v000007" / version_files.CHECKSUMS).unlink()
    with pytest.raises(WeightSyncError, match=r"(?s)copy .*1 of 1 engines.*http://a: CorruptFileError: .*has xxh3-128"):
        load(args, directory, 8, monkeypatch)
    assert Client.log == ["health", "copy"]
