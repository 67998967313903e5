"""Pushes of changes: whole and changed versions, bases, and hosts in every state that a run may find them in."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import xxhash

from slime.ray.remote import RemoteFailure
from slime.weight_sync import files
from slime.weight_sync.fanout import WeightSyncError
from slime.weights import versions as version_files
from slime.weights.delta import host_copy as delta_files
from slime.weights.delta.host_copy import State, pull
from slime.weights.delta.manifest import Manifest
from tests.support.delta_run import DeltaRun, content_of, run_until_line

MakeRun = Callable[..., DeltaRun]


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    return partial(DeltaRun, tmp_path, monkeypatch)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("kind", ["xxh3-128", "adler32"])
def test_changes_follow_a_whole_version(encoding: str, kind: str, make_run: MakeRun) -> None:
    run = make_run(hosts=2, update_weight_delta_encoding=encoding, update_weight_delta_checksum=kind)
    assert [run.push() for _ in range(3)] == [1, 2, 3]
    assert run.kinds() == {1: "whole", 2: "since 1", 3: "since 2"}
    assert run.push(part=0.0) == 4  # nothing has changed
    assert Manifest.read(run.shared / "weight_v000004").tensors == {}
    assert [path.name for path in version_files.versions(run.hosts[0])] == ["weight_v000004"]
    run.files.clear()
    assert run.kinds() == {}


def test_what_a_manifest_says(make_run: MakeRun) -> None:
    """Sums and the state's name by hand; density and bytes from the weights themselves."""
    run = make_run()
    run.push()
    assert (run.writer.density, run.writer.wire_bytes) == (1.0, sum(map(len, run.expected[1].values())))
    run.push()
    whole, changes = (Manifest.read(run.shared / f"weight_v00000{n}") for n in (1, 2))
    assert whole.tensors.keys() == run.expected[1].keys()
    assert changes.base == whole.version
    assert changes.version.run == whole.version.run
    for number, manifest in ((1, whole), (2, changes)):
        digest = xxhash.xxh3_128()
        for name, data in sorted(run.expected[number].items()):
            digest.update(f"{name} {xxhash.xxh3_128(data).hexdigest()}\n".encode())
            if name in manifest.tensors:
                entry = manifest.tensors[name]
                assert entry.sum == xxhash.xxh3_128(data).hexdigest()
                file = (run.shared / "weight_v000001" / entry.file).read_bytes()
                assert file[entry.offset : entry.offset + entry.bytes] == run.expected[1][name]
        assert manifest.version.state == digest.hexdigest()
    changed = 0
    for name, data in run.expected[2].items():
        size = changes.tensors[name].itemsize if name in changes.tensors else len(data) or 1
        before = run.expected[1][name]
        assert (data != before) == (name in changes.tensors)
        changed += sum(size for i in range(0, len(data), size) if data[i : i + size] != before[i : i + size])
    assert run.writer.density == changed / sum(map(len, run.expected[2].values()))
    files = list((run.shared / "weight_v000002").glob("*.bin"))
    assert run.writer.wire_bytes == sum(path.stat().st_size for path in files) > 0


def test_all_is_written_again_at_intervals_and_where_much_changed(make_run: MakeRun) -> None:
    run = make_run(update_weight_delta_full_interval=3)
    for _ in range(4):
        run.push()
    assert run.kinds() == {1: "whole", 2: "since 1", 3: "since 2", 4: "whole"}
    run.push()  # once engines have the new whole one, the others go
    assert run.kinds() == {4: "whole", 5: "since 4"}
    run.push(part=0.4)
    assert run.kinds()[6] == "whole"
    assert run.writer.density == 1.0
    run.push()
    assert run.kinds() == {6: "whole", 7: "since 6"}


def test_changes_are_since_what_all_engines_have(make_run: MakeRun) -> None:
    run = make_run(hosts=2)
    run.push()
    run.push()
    run.failing_host = 1
    with pytest.raises(RemoteFailure, match="gone"):
        run.push()
    run.failing_host = None
    run.files.push([], True)  # again, from the same files
    assert run.kinds() == {1: "whole", 2: "since 1", 3: "since 2"}
    run.failing_host = 1
    with pytest.raises(RemoteFailure, match="gone"):
        run.push()
    run.failing_host = None
    assert run.push() == 5  # the first host had version 4, which was given up
    assert run.kinds() == {1: "whole", 2: "since 1", 3: "since 2", 5: "since 3"}


def test_a_late_host_takes_the_whole_version_and_the_changes_since(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    for _ in range(3):
        run.push()
    run.hosts.append(tmp_path / "late")
    run.files.begin()
    assert run.files.push([], True) == 4
    assert content_of(tmp_path / "late" / "weight_v000004") == run.expected[3]
    assert run.kinds()[4] == "since 3"


@pytest.mark.parametrize("left", [1, 5])
def test_another_runs_directory_is_not_taken_for_ones_own(left: int, make_run: MakeRun) -> None:
    """A run that was resumed, or another, finds what was left: fewer versions, or more, or the same numbers."""
    before = make_run(seed=1)
    for _ in range(left):
        before.push()
    run = make_run()
    for _ in range(3):
        run.push()
    assert run.kinds() == {1: "whole", 2: "since 1", 3: "since 2"}


def test_files_that_are_kept_do_not_mislead_a_later_run(make_run: MakeRun) -> None:
    for _ in range(2):
        run = make_run(update_weight_disk_keep_files=True)
        for _ in range(3):
            run.push()
    assert run.kinds() == {1: "whole", 2: "since 1", 3: "since 2"}


def test_a_damaged_local_file_is_copied_again(make_run: MakeRun) -> None:
    run = make_run()
    run.push()
    name = "layer.0.weight"
    entry = Manifest.read(run.shared / "weight_v000001").tensors[name]
    path = run.hosts[0] / "weight_v000001" / entry.file
    data = bytearray(path.read_bytes())
    data[entry.offset] ^= 1
    path.write_bytes(data)
    run.push(part=0.05)
    (run.hosts[0] / "weight_v000002" / entry.file).unlink()
    run.push()


@pytest.mark.parametrize("damage", ["a payload", "a manifest", "a version"])
def test_what_no_host_can_read_is_written_again(damage: str, make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    run.push()
    run.push()
    run.hosts.append(tmp_path / "late")
    directory = run.shared / "weight_v000002"
    if damage == "a payload":
        (changes,) = directory.glob("*.bin")
        changes.write_bytes(b"\xff" * changes.stat().st_size)
    elif damage == "a manifest":
        (directory / "manifest.json").write_text("{}")
    else:
        directory.rename(tmp_path / "elsewhere")
    run.train()
    assert run.files.push([], True) == 4
    assert run.kinds()[4] == "whole"
    assert [content_of(host / "weight_v000004") for host in run.hosts] == [run.expected[4]] * 2
    assert run.push() == 5


def test_a_whole_version_that_differs_from_its_checksums_ends_the_push(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    run.push()
    path = next((run.shared / "weight_v000001").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(version_files.CorruptFileError, match=path.name):
        pull(run.shared / "weight_v000001", tmp_path / "late")


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_host_that_was_interrupted(encoding: str, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """New values are written again over some of them; differences need the whole version once more."""
    run = make_run(update_weight_delta_encoding=encoding)
    run.push()
    run.train(0.05)
    run.hosts, hosts = [], run.hosts
    version = run.files.push([], True)
    changes = Manifest.read(run.shared / f"weight_v{version:06d}")
    local = hosts[0] / "weight_v000001"
    half = dict(list(changes.tensors.items())[::2])
    delta_files._patch(local, run.shared / "weight_v000002", Manifest(*_but(changes, half)))
    assert changes.base is not None
    State(changes.base, changes.version, delta_files._boot()).write(local)
    copied: list[Path] = []
    copy = version_files.copy_listed

    def noting(source: Path, target: Path) -> None:
        copied.append(source)
        copy(source, target)

    monkeypatch.setattr(version_files, "copy_listed", noting)
    assert content_of(pull(run.shared / "weight_v000002", hosts[0])) == run.expected[2]
    assert len(copied) == (encoding == "xor")


def _but(manifest: Manifest, tensors: dict[str, Any]) -> tuple[Any, ...]:
    return manifest.version, manifest.base, manifest.encoding, manifest.checksum, tensors


def test_a_state_of_before_a_restart_of_the_machine_is_not_trusted(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    run.push()
    directory = run.hosts[0] / "weight_v000001"
    assert State.read(directory) is not None
    monkeypatch.setattr(delta_files, "BOOT_ID", tmp_path / "boot")
    (tmp_path / "boot").write_text("another")
    assert State.read(directory) is None
    run.push()


def test_engines_of_a_host_ask_one_after_the_other(make_run: MakeRun) -> None:
    run = make_run()
    run.push()
    calls: list[tuple[str, int]] = []
    source = run.shared / "weight_v000001"
    before = (run.hosts[0] / "weight_v000001").stat().st_ctime_ns
    for _ in range(2):
        pull(source, run.hosts[0], lambda root, number: calls.append((root, number)))
    assert calls == [(str(run.shared), 1)] * 2
    assert (run.hosts[0] / "weight_v000001").stat().st_ctime_ns == before
    with pytest.raises(FileNotFoundError, match=r"manifest\.json is not there on this host: --update-weight-disk-dir"):
        pull(run.shared / "weight_v000007", run.hosts[0])


def test_tensors_that_repeat_others_change_with_them(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(mtp_num_layers=1)
    monkeypatch.setattr(files, "model_family", lambda args: None)
    monkeypatch.setattr(files, "copies_of", lambda source, family, written: {"copy": "layer.0.weight"})
    monkeypatch.setattr(
        files, "weights_to_push", lambda source: ((n, t) for n, t in source.model.items() if n != "copy")
    )
    run.weights["copy"] = run.weights["layer.0.weight"]
    run.push()
    run.push()
    assert run.kinds()[2] == "since 1"
    assert run.expected[2]["copy"] == run.expected[2]["layer.0.weight"] != run.expected[1]["copy"]


def test_a_weight_of_another_size_is_named(make_run: MakeRun) -> None:
    run = make_run()
    run.push()
    run.weights["norm.weight"] = run.weights["norm.weight"][:5]
    with pytest.raises(WeightSyncError, match=r"norm\.weight had 132 bytes when all was written, and has 20 now"):
        run.push()


def check_kills(make_run: MakeRun, tmp_path: Path, encoding: str, *, sample: int | None) -> None:
    """Kill a host at many lines of an update, from nothing and from its version before: the next one sets it right."""
    run = make_run(update_weight_delta_encoding=encoding)
    run.push()
    run.push()
    run.hosts, hosts = [], run.hosts
    run.push(0.05)
    source = run.shared / "weight_v000003"
    for number in range(2):
        host = tmp_path / f"killed{number}"
        update = partial(_update, host, hosts[0] if number else None, source)
        lines = run_until_line(update, None)
        kills = range(1, lines + 1) if sample is None else random.Random(number).sample(range(1, lines + 1), sample)
        assert lines > 100
        for last in kills:
            run_until_line(update, last)
            for directory in version_files.versions(host):
                state = State.read(directory)
                if state is not None and state.applying is None:
                    assert content_of(directory) == run.expected[state.version.number], last
            assert content_of(pull(source, host)) == run.expected[3], last
            assert len(version_files.versions(host)) == 1


def _update(host: Path, before: Path | None, source: Path) -> None:
    """Pull ``source`` on a host that is empty, or is as ``before``."""
    shutil.rmtree(host, ignore_errors=True)
    if before is not None:
        shutil.copytree(before, host)
    pull(source, host)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_kills_at_random_lines(encoding: str, make_run: MakeRun, tmp_path: Path) -> None:
    check_kills(make_run, tmp_path, encoding, sample=8)


@pytest.mark.soak
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_kills_at_every_line(encoding: str, make_run: MakeRun, tmp_path: Path) -> None:
    check_kills(make_run, tmp_path, encoding, sample=None)


def test_a_state_that_is_no_state(tmp_path: Path) -> None:
    for text in ("", "{}", "[]", json.dumps({"version": {"run": "r"}, "applying": None, "boot": ""})):
        (tmp_path / "state.json").write_text(text)
        assert State.read(tmp_path) is None
