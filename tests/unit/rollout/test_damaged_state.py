"""The state of prompts, samples carried over and the journal: every bit counts, and what is gone is missed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from slime.arguments.errors import ArgumentError
from slime.backends.megatron_utils.checkpoints import directory as checkpoint_dir
from slime.ray.manager.conversion import carried_over_path, read_carried_over, write_carried_over
from slime.rollout import data_source
from slime.rollout.durable import journal_writer
from slime.utils import digests
from tests.support.arguments import parse
from tests.support.journal_model import COMPLETED, make_group, reopened
from tests.support.rollout_args import CharTokenizer, rollout_args, write_prompts


def flips(content: bytes, count: int = 60) -> list[bytes]:
    """Return ``content`` with one bit changed, of its first and last bytes and of some between."""
    between = range(30, len(content) - 30, max(1, len(content) // count))
    places = sorted({*range(30), *between, *range(len(content) - 30, len(content))} & {*range(len(content))})
    return [content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :] for at in places]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> data_source.RolloutDataSourceWithBuffer:
    monkeypatch.setattr(data_source, "load_tokenizer", lambda *a, **k: CharTokenizer())
    prompts = write_prompts(tmp_path / "prompts.jsonl", 5)
    args = rollout_args(prompt_data=str(prompts), save=str(tmp_path), load=str(tmp_path))
    made = data_source.RolloutDataSourceWithBuffer(args)
    made.get_samples(2)
    made.buffer = [make_group(7, [1, 2], COMPLETED)]
    return made


def test_the_state_of_prompts(source: data_source.RolloutDataSourceWithBuffer, tmp_path: Path) -> None:
    for rollout_id in (0, 1):
        source.save(rollout_id)
    path = tmp_path / "rollout/global_dataset_state_dict_1.json"
    content = path.read_bytes()
    assert json.loads(content)["sample_offset"] == 2
    other = (tmp_path / "rollout/global_dataset_state_dict_0.json").read_bytes()
    for changed in [*flips(content), content[: len(content) // 2], b"", other]:
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=str(path)):
            source.load(1)
    path.write_bytes(content)
    source.load(1)
    assert source.sample_offset == 2
    found = json.loads(content)
    del found["sealed"], found["digest"]
    path.write_text(json.dumps(found))  # as slime <= 0.3.1 writes it
    source.load(1)
    path.unlink()
    path.with_suffix(".pt").write_bytes(b"no pickle")
    with pytest.raises(ValueError, match=r"global_dataset_state_dict_1\.pt cannot be read"):
        source.load(1)


def test_samples_carried_over(tmp_path: Path) -> None:
    path = carried_over_path(str(tmp_path), 3)
    assert read_carried_over(path) is None
    state = b'{"samples":[],"rows":{}}'
    write_carried_over(path, state)
    assert read_carried_over(path) == state
    content = path.read_bytes()
    for changed in [*flips(content), content[:-5], b""]:
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=f"{path} is damaged"):
            read_carried_over(path)


def test_state_that_was_saved_with_a_checkpoint_and_is_gone(tmp_path: Path) -> None:
    checkpoint_dir.check_rollout_files(tmp_path, 3)  # of another program
    (tmp_path / "rollout").mkdir()
    for name in ("global_dataset_state_dict_3.json", "carried_over_3.json", "carried_over_13.json"):
        (tmp_path / "rollout" / name).write_text("{}")
    directory = checkpoint_dir.begin(tmp_path, 3)
    digests.write(directory, {}, checkpoint_dir.rollout_files(tmp_path, 3))
    checkpoint_dir.publish(tmp_path, 3)
    checkpoint_dir.check_rollout_files(tmp_path, 3)
    (tmp_path / "rollout/carried_over_13.json").unlink()
    checkpoint_dir.check_rollout_files(tmp_path, 3)
    for name in ("global_dataset_state_dict_3.json", "carried_over_3.json"):
        (tmp_path / "rollout" / name).rename(tmp_path / "aside")
        with pytest.raises(FileNotFoundError, match=f"{tmp_path}/rollout/{name} was saved with .*--ckpt-step"):
            checkpoint_dir.check_rollout_files(tmp_path, 3)
        if name.startswith("global"):
            checkpoint_dir.check_rollout_files(tmp_path, 3, prompts=False)  # of --disable-rollout-global-dataset
        (tmp_path / "aside").rename(tmp_path / "rollout" / name)


def test_a_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_writer, "sync", lambda path: None)
    journal, _ = reopened(tmp_path, 0)
    for number in range(3):
        journal.completed(make_group(number, [5, 6], COMPLETED))
    journal.flush()
    path = journal.path(0)
    content = path.read_bytes()
    for changed in flips(content):
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=f"{path} is damaged at byte .*: remove it"):
            reopened(tmp_path, 0)
        assert path.read_bytes() == changed  # nothing of it is lost
    path.write_bytes(content)
    assert list(reopened(tmp_path, 0)[1][1]) == [0, 1, 2]


def test_a_tracker_is_looked_at_before_anything_starts(tmp_path: Path) -> None:
    save = ["--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", "1"]
    for iteration in (1, 3):
        checkpoint_dir.begin(tmp_path, iteration)
        checkpoint_dir.publish(tmp_path, iteration)
    tracker = tmp_path / checkpoint_dir.TRACKER
    parse(*save)
    at = tracker.stat().st_mtime_ns
    tracker.write_text("1\n")  # one bit
    os.utime(tracker, ns=(at, at))
    with pytest.raises(ArgumentError, match=f"--load {tmp_path}: {tracker} holds b'1.n', which is not what"):
        parse(*save)
    parse(*save, "--ckpt-step", "3")
    tracker.unlink()
    with pytest.raises(ArgumentError, match=f"{tracker} is gone"):
        parse(*save)
