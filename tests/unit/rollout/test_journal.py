"""The journal of groups: exact, whatever happens to the end of its file, and never in the way of the run."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from slime.rollout.durable import journal_writer
from slime.rollout.durable.journal_file import decode_record, encode_parts, read_records, to_json
from slime.rollout.durable.recovery import GroupJournal
from slime.utils.types import Sample
from tests.support.journal_model import (
    ABORTED,
    COMPLETED,
    PENDING,
    SETTING,
    check_one_history,
    make_group,
    reopened,
)


def encode_record(record: Any) -> bytes:
    return b"".join(encode_parts([to_json(record)]))


@pytest.fixture(autouse=True)
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names that are synced; a kill, unlike the loss of the machine, needs no wait for the disk."""
    names: list[str] = []
    monkeypatch.setattr(journal_writer, "sync", lambda path: names.append(path.name))
    return names


@pytest.mark.parametrize("seed", range(150))
def test_a_damaged_file_says_what_its_whole_part_says(tmp_path: Path, seed: int) -> None:
    check_one_history(tmp_path / "rollout", seed)


def test_lines_are_json_with_length_and_checksum(tmp_path: Path) -> None:
    record = {"text": 'é\n"}', "list": [1, 2.5, None]}
    line = encode_record(record)
    outer = json.loads(line)
    assert outer["record"] == record
    assert line.endswith(b"}\n")
    assert line.count(b"\n") == 1
    assert len(json.dumps(outer["record"], separators=(",", ":"))) == outer["len"]
    assert decode_record(line) == record
    path = tmp_path / "file"
    path.write_bytes(line * 3 + line[:-1])
    assert list(read_records(path)) == [(record, len(line) * n) for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("start", "end"),
    [(4096, 8192), (4096, 4608), (0, 4096), (8192, 12288), (3000, 4096)],
    ids=["a block", "a sector", "the first", "the last", "from where the file had ended"],
)
def test_what_follows_a_block_that_never_reached_the_disk_is_no_record(tmp_path: Path, start: int, end: int) -> None:
    line = encode_record({"text": "x" * 1000})
    content = line * (12288 // len(line) + 1)
    path = tmp_path / "file"
    path.write_bytes(content[:start] + bytes(end - start) + content[end:])
    assert [position for _, position in read_records(path)] == [len(line) * (n + 1) for n in range(start // len(line))]


def test_a_flipped_bit_that_makes_a_zero_is_damage(tmp_path: Path) -> None:
    line, path = encode_record({"text": "two words"}), tmp_path / "file"
    for content in (line.replace(b" ", b"\0"), line.replace(b" ", b"\0") + line, line + line.replace(b" ", b"\0")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{path} is damaged at byte"):
            list(read_records(path))


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"{}\n", encode_record([1])[:-1], encode_record([1])[1:], encode_record([1]) + b"\n"]
)
def test_anything_else_is_no_record(line: bytes) -> None:
    with pytest.raises(ValueError, match="record"):
        decode_record(line)


def test_what_is_flushed_is_synced(tmp_path: Path, synced: list[str]) -> None:
    journal, _ = reopened(tmp_path, 2)
    journal.completed(make_group(0, [1], COMPLETED))
    journal.flush()
    assert synced[-1:] == ["journal_2.jsonl"]
    assert len(synced) <= 2  # once for both records, or once for each when the first was written before


def test_other_flags_than_then_make_a_journal_useless(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal, _ = reopened(tmp_path, 0)
    journal.completed(make_group(0, [1], COMPLETED))
    journal.flush()
    other = GroupJournal(tmp_path, {**SETTING, "rollout_temperature": 0.5})
    assert other.resume(0).generated == {}
    assert "flags that decide over what is generated have changed" in caplog.text
    other.completed(make_group(1, [2], COMPLETED))
    other.flush()
    assert reopened(tmp_path, 0)[1] == ([], {}, {})  # and what is made now is not for the flags of then


def test_only_wanted_rollouts_are_written_and_old_ones_forgotten(tmp_path: Path) -> None:
    journal, _ = reopened(tmp_path, 3)
    for rollout_id in range(3, 9):
        journal.completed(make_group(rollout_id, [1], COMPLETED))
        journal.turn_over(rollout_id + 1, wanted=(rollout_id + 1) % 2 == 0)
    journal.flush()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["journal_3.jsonl", "journal_4.jsonl", "journal_6.jsonl", "journal_8.jsonl"]
    journal.forget_before(6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal_6.jsonl", "journal_8.jsonl"]
    (tmp_path / "journal_of_mine.jsonl").write_text("kept")
    journal, (_, generated, _) = reopened(tmp_path, 6)
    assert list(generated) == [6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal_6.jsonl", "journal_of_mine.jsonl"]


def test_before_it_is_opened_nothing_is_written(tmp_path: Path) -> None:
    journal = GroupJournal(tmp_path / "rollout", SETTING)
    journal.completed(make_group(0, [1], COMPLETED))
    journal.consumed(0, [0])
    journal.flush()
    assert not (tmp_path / "rollout").exists()


def test_groups_without_a_number_are_left_out(tmp_path: Path) -> None:
    journal, _ = reopened(tmp_path, 0)
    group = make_group(0, [1], COMPLETED)
    group[0].group_index = None
    journal.completed(group)
    journal.dispatched([group])
    journal.completed([])  # type: ignore[arg-type]
    journal.flush()
    assert reopened(tmp_path, 0)[1] == ([], {}, {})


def test_nested_groups_and_the_last_state_count(tmp_path: Path) -> None:
    journal, _ = reopened(tmp_path, 0)
    one, two = make_group(5, [1, 2], COMPLETED)
    journal.returned(make_group(5, [1], ABORTED))
    journal.completed([[one, two], two])
    journal.returned(make_group(6, [], PENDING))
    journal.flush()
    assert reopened(tmp_path, 0)[1] == ([], {5: [[one, two], two]}, {})


def test_what_cannot_be_stored_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal, _ = reopened(tmp_path, 0)
    bad = make_group(1, [1], COMPLETED)
    bad[0].train_metadata = {"handle": threading.Lock()}
    journal.completed(bad)
    journal.completed(make_group(2, [1], COMPLETED))
    journal.flush()
    assert "field 'train_metadata'" in caplog.text
    assert list(reopened(tmp_path, 0)[1][1]) == [2]


def test_a_file_that_cannot_be_looked_at_ends_its_journal_and_no_other(tmp_path: Path, monkeypatch, caplog) -> None:
    journal, _ = reopened(tmp_path, 0)
    broken, exists = journal.path(0), Path.exists

    def stale(path: Path) -> bool:
        if path == broken:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", stale)
    journal.completed(make_group(1, [1], COMPLETED))
    journal.flush()
    assert "the journal of this rollout ends" in caplog.text
    assert str(broken) in caplog.text
    journal.turn_over(1, wanted=True)
    journal.completed(make_group(2, [1], COMPLETED))
    journal.flush()
    assert [record["kind"] for record, _ in read_records(journal.path(1))][-1] == "completed"


def test_a_full_disk_ends_the_journal_of_a_rollout_and_not_the_run(tmp_path: Path, caplog) -> None:
    """``/dev/full`` takes nothing; the message names the file and the space, and the next rollout tries again."""
    journal, _ = reopened(tmp_path, 0)
    journal.completed(make_group(1, [1], COMPLETED))
    journal.flush()
    journal.path(0).rename(tmp_path / "kept")
    journal.path(0).symlink_to("/dev/full")
    for number in (2, 3):
        journal.completed(make_group(number, [1], COMPLETED))
        journal.flush()
    assert re.search(rf"{journal.path(0)}: cannot be written: No space left on device \(\d+ MiB are free", caplog.text)
    assert len(caplog.records) == 1
    journal.turn_over(1, wanted=True)
    journal.completed(make_group(4, [1], COMPLETED))
    journal.flush()
    journal.path(0).unlink()
    (tmp_path / "kept").rename(journal.path(0))
    assert list(read_records(journal.path(1)))[1][0]["group"] == 4
    assert list(reopened(tmp_path, 0)[1][1]) == [1]


def test_a_record_cut_off_by_a_full_disk_is_not_followed_by_others(tmp_path: Path, monkeypatch, caplog) -> None:
    journal, _ = reopened(tmp_path, 0)
    append = journal_writer._append

    def half(path: Path, entries: Any) -> None:
        with open(path, "ab") as file:
            file.write(b"".join(entries[0].line())[:-7])
        raise OSError(errno.ENOSPC, "No space left on device")

    journal.completed(make_group(1, [1], COMPLETED))
    journal.flush()
    monkeypatch.setattr(journal_writer, "_append", half)
    journal.completed(make_group(2, [1], COMPLETED))
    journal.flush()
    monkeypatch.setattr(journal_writer, "_append", append)
    journal.completed(make_group(3, [1], COMPLETED))
    journal.flush()
    again, (_, generated, _) = reopened(tmp_path, 0)
    assert list(generated) == [1]
    assert "are no whole record and are cut off" in caplog.text
    again.completed(make_group(3, [1], COMPLETED))
    again.flush()
    assert list(reopened(tmp_path, 0)[1][1]) == [1, 3]


def test_a_directory_that_cannot_be_made_stops_nothing(tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("")
    journal, nothing = reopened(tmp_path / "file" / "rollout", 0)
    assert nothing == ([], {}, {})
    journal.completed(make_group(1, [1], COMPLETED))
    journal.flush()
    assert f"{journal.path(0)}: cannot be written: Not a directory" in caplog.text


def test_a_directory_that_is_missing_is_made(tmp_path: Path) -> None:
    journal, _ = reopened(tmp_path / "not" / "yet", 0)
    journal.completed(make_group(1, [1], COMPLETED))
    journal.flush()
    shutil.rmtree(tmp_path / "not")  # by someone else, in the middle of the run
    journal.turn_over(1, wanted=True)
    journal.completed(make_group(2, [1], COMPLETED))
    journal.flush()
    assert list(reopened(tmp_path / "not" / "yet", 1)[1][1]) == [2]


@pytest.mark.parametrize("name", ["unlink", "truncate"])
def test_a_read_only_directory_stops_nothing(tmp_path: Path, monkeypatch, caplog, name: str) -> None:
    journal, _ = reopened(tmp_path, 0)
    journal.completed(make_group(1, [1], COMPLETED))
    journal.flush()
    with open(journal.path(0), "ab") as file:
        file.write(b"cut")
    (tmp_path / "journal_7.jsonl").write_text("old")

    def refuse(path: Any, *_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    with monkeypatch.context() as context:
        context.setattr(*((Path, "unlink", refuse) if name == "unlink" else (os, "truncate", refuse)))
        again, _ = reopened(tmp_path, 0)
        again.turn_over(7, wanted=True)
        again.forget_before(9)
        again.flush()
    assert f"Read-only file system: '{tmp_path}/journal_" in caplog.text


def test_what_breaks_the_writing_thread_is_not_waited_for(tmp_path: Path, monkeypatch, caplog) -> None:
    journal, _ = reopened(tmp_path, 0)

    def broken(*_: Any) -> None:
        raise RuntimeError("boom")

    with monkeypatch.context() as context:
        context.setattr(journal_writer, "_append", broken)
        journal.completed(make_group(1, [1], COMPLETED))
        journal.flush()
    assert "boom" in caplog.text
    journal.completed(make_group(2, [1], COMPLETED))
    journal.flush()
    journal.turn_over(1, wanted=True)
    journal.completed(make_group(3, [1], COMPLETED))
    journal.flush()
    assert list(reopened(tmp_path, 1)[1][1]) == [3]


def test_what_fails_in_one_group_does_not_concern_the_others(tmp_path: Path, monkeypatch, caplog) -> None:
    journal, _ = reopened(tmp_path, 0)
    endless: dict[str, Any] = {}
    endless["itself"] = endless
    bad = make_group(1, [1], COMPLETED)
    bad[0].metadata = endless
    journal.completed(bad)
    journal.completed(make_group(2, [1], COMPLETED))
    journal.flush()
    assert "group 1 is left out of the journal" in caplog.text
    assert list(reopened(tmp_path, 0)[1][1]) == [2]


@pytest.mark.parametrize("format_", [1, 99])
def test_journals_of_other_releases(tmp_path: Path, caplog, format_: int) -> None:
    (tmp_path / "journal_0.jsonl").write_bytes(
        encode_record({"kind": "begin", "format": format_, "rollout": 0, "setting": SETTING})
        + encode_record({"kind": "dispatched", "groups": [5]})
    )
    dispatched = reopened(tmp_path, 0)[1][0]
    assert dispatched == ([5] if format_ == 1 else [])
    assert ("of another version of slime" in caplog.text) == (format_ == 99)


def test_a_slow_disk_costs_groups_and_not_memory(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(journal_writer, "MAX_WAITING", 3)
    append, go = journal_writer._append, threading.Event()

    def slow(path: Path, entries: Any) -> None:
        assert go.wait(60)
        append(path, entries)

    monkeypatch.setattr(journal_writer, "_append", slow)
    journal, _ = reopened(tmp_path, 0)
    for number in range(20):
        journal.completed(make_group(number, [1], COMPLETED))  # returns while the disk keeps the thread waiting
    go.set()
    journal.flush()
    assert caplog.text.count("too slow for the journal") == 1
    kept = list(reopened(tmp_path, 0)[1][1])
    assert 1 <= len(kept) < 20
    assert kept == sorted(kept)


def test_who_notes_a_group_encodes_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the event loop only copies; what takes long is done elsewhere, with a breath after each list."""
    threads, breaths = set(), []

    def in_thread(function: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            threads.add(threading.current_thread().name)
            return function(*args, **kwargs)

        return noted

    for name in ("encode_group", "to_json", "_append", "sync"):
        monkeypatch.setattr(journal_writer, name, in_thread(getattr(journal_writer, name)))
    monkeypatch.setattr(journal_writer.time, "sleep", breaths.append)
    journal, _ = reopened(tmp_path, 0)
    journal.completed(make_group(1, list(range(700)), COMPLETED))
    journal.flush()
    assert threads == {"journal"}
    # Of each of two samples: ids, log-probs and mask, and the whole.
    assert breaths == [journal_writer.BREATH_S] * 8


def test_many_threads_and_no_thread_left(tmp_path: Path) -> None:
    journal, _ = reopened(tmp_path, 0)

    def note(start: int) -> None:
        for number in range(start, start + 50):
            journal.completed(make_group(number, [number], COMPLETED))

    threads = [threading.Thread(target=note, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.flush()
    end = time.monotonic() + 20
    while any(thread.name == "journal" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)
    generated = reopened(tmp_path, 0)[1][1]
    assert sorted(generated) == [100 * i + n for i in range(4) for n in range(50)]
    assert all(isinstance(s, Sample) and s.tokens == [number] for number, g in generated.items() for s in g)
