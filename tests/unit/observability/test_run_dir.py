"""Files that a run leaves behind: configuration without secrets, versions, samples, timers, progress lines."""

from __future__ import annotations

import argparse
import enum
import json
import logging
import stat
import types

import pytest
import yaml

from slime.observability import logging_utils, run_dir, samples
from slime.observability.progress import progress_bar
from slime.observability.timer import Timers
from slime.utils import secrets
from tests.support.arguments import run_args


class Status(enum.Enum):
    COMPLETED = "completed"


def make_sample(i, **fields):
    return types.SimpleNamespace(
        index=i, group_index=i // 2, prompt=f"p{i}", response=f"r{i}", reward=float(i), status=Status.COMPLETED,
        response_length=i, metadata={}, **fields,
    )  # fmt: skip


def test_prepare_writes_what_one_needs_to_know(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--wandb-key", "abc", "--sglang-api-key=def", "--lr", "1"])
    args = argparse.Namespace(
        run_dir=str(tmp_path / "r"), lr=1e-3, wandb_key="abc", hook=print, nested={"api_key": "x"}
    )
    path = run_dir.prepare(args)
    assert args.run_dir == str(path)
    config = yaml.safe_load((path / "config.yaml").read_text())
    assert config["lr"] == 1e-3
    assert config["wandb_key"] == config["nested"]["api_key"] == "***"
    assert (path / "command.txt").read_text() == "train.py --wandb-key '***' '--sglang-api-key=***' --lr 1\n"
    versions = json.loads((path / "versions.json").read_text())
    assert versions["packages"]["pydantic"]
    assert run_dir.log_path(args, "engine_0") == path / "logs" / "engine_0.log"


def test_prepare_again_keeps_the_earlier_configuration(tmp_path):
    for lr in (1, 2, 3):
        run_dir.prepare(run_args(run_dir=str(tmp_path), lr=lr))
    found = {p.name: yaml.safe_load(p.read_text())["lr"] for p in tmp_path.glob("config*.yaml")}
    assert found == {"config.1.yaml": 1, "config.2.yaml": 2, "config.yaml": 3}


def test_default_run_dir_is_below_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = run_dir.prepare(run_args())
    assert path.parent == tmp_path / "runs"
    assert path.is_absolute()


def test_samples_are_spread_over_the_rollout(tmp_path):
    args = run_args(run_dir=str(tmp_path))
    groups = [[make_sample(2 * i), make_sample(2 * i + 1)] for i in range(50)]
    path = samples.write(args, 3, groups, limit=4)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.name == "3.jsonl"
    assert [r["index"] for r in rows] == [0, 25, 50, 75]
    assert rows[1] == {
        "index": 25, "group_index": 12, "prompt": "p25", "response": "r25", "reward": 25.0, "status": "completed",
        "response_length": 25,
    }  # fmt: skip


def test_evaluations_name_their_data_set(tmp_path):
    args = run_args(run_dir=str(tmp_path))
    data = {"gsm": {"rewards": [1.0], "samples": [make_sample(0, label="4")]}, "aime": [make_sample(1)]}
    path = samples.write(args, 0, data, evaluation=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.name == "eval-0.jsonl"
    assert [(r["dataset"], r["index"]) for r in rows] == [("gsm", 0), ("aime", 1)]
    assert rows[0]["label"] == "4"


def test_samples_hold_chats_odd_values_and_long_texts(tmp_path):
    odd = types.SimpleNamespace(
        prompt=[{"role": "user", "content": "hi"}], response="x" * 50_000, reward={"acc": float("nan")},
        metadata={"object": object()},
    )  # fmt: skip
    path = samples.write(run_args(run_dir=str(tmp_path)), 0, [odd])
    (row,) = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert json.loads(row["prompt"])[0]["content"] == "hi"
    assert len(row["response"]) < 21_000
    assert "30000 characters left out" in row["response"]
    assert row["reward"] == {"acc": "nan"}


def test_no_run_directory_no_samples():
    assert samples.write(run_args(), 0, [make_sample(0)]) is None


def test_timers_add_up(monkeypatch):
    clock = iter([0.0, 1.5, 10.0, 10.25, 20.0, 21.0])
    monkeypatch.setattr("slime.observability.timer.time.monotonic", lambda: next(clock))
    timers = Timers()
    with timers.measure("train"):
        pass
    with timers.measure("train"):
        pass
    timers.start("wait")
    assert timers.stop("wait") == 1.0
    assert timers.drain() == {"perf/train_time": 1.75, "perf/wait_time": 1.0}
    assert timers.drain() == {}
    with pytest.raises(RuntimeError, match="without a start"):
        timers.stop("wait")


def test_progress_logs_where_there_is_no_terminal(caplog, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    caplog.set_level(logging.INFO)
    with progress_bar("rollout 3", total=4, unit="groups", interval_s=0.0) as bar:
        bar.update(2, reward=0.25)
    assert "rollout 3: 2/4 groups" in caplog.text
    assert "reward 0.25" in caplog.text
    assert "left" in caplog.messages[0]
    caplog.clear()
    with progress_bar("quick", total=1, interval_s=60.0) as bar:
        bar.update()
    assert caplog.text == ""


def test_configure_logger_writes_to_a_file_and_replaces_itself(tmp_path):
    before = list(logging.getLogger().handlers)
    level = logging.getLogger().level
    try:
        logging_utils.configure_logger("old", log_file=tmp_path / "old.log")
        logging_utils.configure_logger("actor rank 0", log_file=tmp_path / "logs" / "a.log")
        logging.getLogger("x").info("hello")
        assert "actor rank 0] INFO x:" in (tmp_path / "logs" / "a.log").read_text()
        assert "hello" not in (tmp_path / "old.log").read_text()
    finally:
        for handler in [h for h in logging.getLogger().handlers if h not in before]:
            logging.getLogger().removeHandler(handler)
            handler.close()
        logging.getLogger().setLevel(level)


def test_half_of_a_surrogate_pair_is_no_reason_to_stop(tmp_path):
    path = samples.write(run_args(run_dir=str(tmp_path)), 0, [make_sample(0, label="\ud83d")])
    assert path is not None
    (row,) = map(json.loads, path.read_text().splitlines())
    assert row["label"] == "\ud83d"


def test_a_sample_is_one_line_for_every_reader(tmp_path):
    """Python's str.splitlines ends a line at more characters than a file does."""
    text = "".join(map(chr, range(0x3000)))
    path = samples.write(run_args(run_dir=str(tmp_path)), 0, [make_sample(i, label=text) for i in range(2)])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["label"] for row in rows] == [text] * 2
    assert "\u00e9" in path.read_text()  # other characters are left for people to read


def test_what_it_holds_is_private_and_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "of-the-environment")
    monkeypatch.setattr("sys.argv", ["train.py", "--rm-url", "https://u:hush@h", "--wandb-key=of-wandb", "--lr", "1"])
    args = argparse.Namespace(
        run_dir=str(tmp_path / "r"), rm_url="https://u:hush@h", wandb_key="of-wandb", lr=1e-3, copy="of-wandb",
        train_env_vars={"OPENAI_KEY": "o-key", "deeper": [{"a": {"jwt": "j-key"}}]}, note="of-the-environment",
    )  # fmt: skip
    path = run_dir.prepare(args)
    text = (path / "config.yaml").read_text() + (path / "command.txt").read_text()
    assert not [word for word in ("hush", "of-wandb", "o-key", "j-key", "of-the-environment") if word in text]
    assert yaml.safe_load((path / "config.yaml").read_text())["rm_url"] == "https://***@h"
    assert {stat.S_IMODE(p.stat().st_mode) for p in (path, path / "logs", path / "samples")} == {0o700}
    assert {stat.S_IMODE(p.stat().st_mode) for p in path.glob("*.*")} == {0o600}


def test_a_directory_that_has_other_uses_keeps_its_mode(tmp_path):
    (tmp_path / "shared").mkdir(mode=0o755)
    path = run_dir.prepare(run_args(run_dir=str(tmp_path / "shared")))
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert stat.S_IMODE((path / "config.yaml").stat().st_mode) == 0o600


def test_logs_hide_secrets_and_are_private(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "of-the-environment")
    secrets._pattern.cache_clear()
    file = tmp_path / "logs" / "x.log"
    logging_utils.configure_logger("x", log_file=file)
    try:
        logging.getLogger("slime.test").warning("asked %s with %s", "https://u:hush@h/v1", "of-the-environment")
        try:
            raise ValueError("Authorization: Bearer abcdefghijkl")
        except ValueError:
            logging.getLogger("slime.test").exception("it failed")
    finally:
        for handler in [h for h in logging.getLogger().handlers if getattr(h, "_slime_handler", False)]:
            logging.getLogger().removeHandler(handler)
            handler.close()
    text = file.read_text()
    assert "asked https://***@h/v1 with ***" in text
    assert "abcdefghijkl" not in text
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
