"""Ten thousand histories of the journal, and of runs with their data source, each cut or damaged at a random byte."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.rollout import data_source
from slime.rollout.durable import journal_writer
from slime.utils import atomic_file
from tests.support.data_source_model import History
from tests.support.journal_model import COMPLETED, check_one_history, make_group, reopened
from tests.support.rollout_args import CharTokenizer, rollout_args, write_prompts

pytestmark = pytest.mark.soak


@pytest.mark.timeout(1800)
def test_ten_thousand_histories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_writer, "sync", lambda path: None)  # kills do not need it, and it is slow
    for seed in range(1000, 11000):
        check_one_history(tmp_path / "rollout", seed)
        shutil.rmtree(tmp_path / "rollout")


@pytest.mark.timeout(3600)
def test_ten_thousand_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_source, "load_tokenizer", lambda *a, **k: CharTokenizer())
    for module in (journal_writer, atomic_file):
        monkeypatch.setattr(module, "sync", lambda path: None)
    resumed = saved = 0
    for seed in range(10_000):
        rng = random.Random(seed)
        partial, keeps, buffer = rng.random() < 0.5, rng.random() < 0.4, rng.random() < 0.7
        with History(tmp_path / "run", partial and buffer, keeps, buffer, rng.randrange(1, 4)) as history:
            history.play_at_random(seed)
            resumed, saved = resumed + history.resumed, saved + (history.checkpoint[0] >= 0)
    print(f"{resumed} groups were resumed, {saved} runs had a checkpoint at their end")
    assert resumed > 10_000
    assert saved > 1_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_small_disk(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Groups as far as there is room, then a message; a state that has no room stops the run and leaves the old one."""
    journal, _ = reopened(small_disk / "rollout", 0)
    groups = [make_group(number, list(range(700)), COMPLETED) for number in range(20)]
    for group in groups:
        journal.completed(group)
    journal.flush()
    assert f"{journal.path(0)}: cannot be written: No space left on device (0 MiB are free there)" in caplog.text
    kept = reopened(small_disk / "rollout", 0)[1][1]
    assert 1 <= len(kept) < 20
    assert kept == {number: groups[number] for number in range(len(kept))}


def test_a_state_on_a_small_disk(small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_source, "load_tokenizer", lambda *a, **k: CharTokenizer())
    prompts = write_prompts(tmp_path / "prompts.jsonl", 5)
    args = rollout_args(prompt_data=str(prompts), save=str(small_disk), load=str(small_disk))
    source = data_source.RolloutDataSourceWithBuffer(args)
    source.get_samples(2)
    source.save(0)
    source.buffer = [make_group(number, list(range(700)), COMPLETED) for number in range(20)]
    where = small_disk / "rollout" / "global_dataset_state_dict_1.json"
    with pytest.raises(OSError, match=rf"{where}: cannot be written: No space left on device \(0 MiB are free there\)"):
        source.save(1)
    assert [path.name for path in where.parent.iterdir()] == ["global_dataset_state_dict_0.json"]
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(OSError, match=rf"{where}: cannot be written: Read-only file system"):
        source.save(1)
    again = data_source.RolloutDataSourceWithBuffer(args)
    again.load(0)
    assert again.get_samples(1)[0][0].prompt == "p2"
