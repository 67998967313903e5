"""Metrics reach every destination once, from one process, whatever process measured them."""

from __future__ import annotations

import json
import math
import pickle
import types
from typing import Any

import numpy as np
import pytest

from slime.observability import logging_utils, tracking
from slime.observability.logging_utils import JsonlWriter, TensorBoardWriter, WandbWriter, wandb_config
from slime.observability.tracking import Tracker, to_records
from tests.support.arguments import run_args


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Tracker:
    fresh = Tracker()
    monkeypatch.setattr(tracking, "_tracker", fresh)
    return fresh


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_primary_writes_one_line_per_metric(tmp_path, tracker):
    args = run_args(run_dir=str(tmp_path))
    logging_utils.init_tracking(args)
    logging_utils.log(args, {"train/step": 7, "train/loss": 0.5, "train/n": np.int64(3)}, "train/step")
    logging_utils.finish_tracking(args)
    rows = read(tmp_path / "metrics.jsonl")
    assert [(r["step_key"], r["step"], r["name"], r["value"]) for r in rows] == [
        ("train/step", 7, "train/loss", 0.5),
        ("train/step", 7, "train/n", 3),
    ]


def test_secondary_buffers_and_the_driver_ingests(tmp_path, tracker):
    secondary = Tracker()
    secondary.add(to_records({"rollout/step": 2, "rollout/raw_reward": 0.25}, "rollout/step"))
    records = pickle.loads(pickle.dumps(secondary.drain()))
    assert secondary.drain() == []
    logging_utils.init_tracking(run_args(run_dir=str(tmp_path)))
    tracking.ingest(records)
    logging_utils.finish_tracking()
    (row,) = read(tmp_path / "metrics.jsonl")
    assert (row["step"], row["name"], row["value"]) == (2, "rollout/raw_reward", 0.25)
    assert row["time"] == pytest.approx(records[0]["time"], abs=1e-3)


@pytest.mark.parametrize("complete", [True, False])
def test_what_was_not_fetched_is_asked_for_at_the_end(tmp_path, tracker, complete):
    secondary = Tracker()
    logging_utils.init_tracking(run_args(run_dir=str(tmp_path)))
    tracker.add_source(secondary.drain)
    secondary.add(to_records({"train/step": 1, "train/late": 2.0}, "train/step"))
    logging_utils.finish_tracking(complete=complete)
    assert [row["name"] for row in read(tmp_path / "metrics.jsonl")] == (["train/late"] if complete else [])
    logging_utils.init_tracking(run_args(run_dir=str(tmp_path)))
    secondary.add(to_records({"train/step": 1, "train/of no run": 2.0}, "train/step"))
    logging_utils.finish_tracking()
    assert "train/of no run" not in (tmp_path / "metrics.jsonl").read_text()


def test_a_source_that_fails_keeps_no_writer_open(tmp_path, tracker, caplog):
    def gone():
        raise RuntimeError("Ray has been shut down")

    secondary = Tracker()
    secondary.add(to_records({"train/step": 1, "train/late": 2.0}, "train/step"))
    logging_utils.init_tracking(run_args(run_dir=str(tmp_path)))
    for source in (gone, secondary.drain):
        tracker.add_source(source)
    logging_utils.finish_tracking()
    assert not tracker.is_primary
    assert [row["name"] for row in read(tmp_path / "metrics.jsonl")] == ["train/late"]
    assert "Ray has been shut down" in caplog.text


def test_what_was_logged_before_the_writers_opened_is_not_lost(tmp_path, tracker):
    logging_utils.log(None, {"train/step": 0, "train/early": 1.0}, "train/step")
    logging_utils.init_tracking(run_args(run_dir=str(tmp_path)))
    logging_utils.finish_tracking()
    assert [r["name"] for r in read(tmp_path / "metrics.jsonl")] == ["train/early"]


def test_the_step_must_be_among_the_metrics(tracker):
    with pytest.raises(KeyError, match=r"train/step.*train/loss"):
        logging_utils.log(None, {"train/loss": 1.0}, "train/step")


def test_tensors_become_numbers(tracker):
    torch = pytest.importorskip("torch")
    logging_utils.log(
        None, {"train/step": torch.tensor(3), "a": torch.tensor(1.5), "b": torch.tensor([2.0])}, "train/step"
    )
    assert [(r["step"], r["value"]) for r in tracker.drain()] == [(3, 1.5), (3, 2.0)]


def test_the_buffer_is_bounded(monkeypatch, caplog):
    monkeypatch.setattr(tracking, "BUFFER_LIMIT", 3)
    small = Tracker()
    for i in range(5):
        small.add(to_records({"s": i, "v": i}, "s"))
    assert [r["value"] for r in small.drain()] == [2, 3, 4]
    assert "oldest are lost" in caplog.text


def test_jsonl_is_strict_json_and_survives_a_truncated_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step_key": "train/step", "st')
    writer = JsonlWriter(path)
    writer.write("train/step", 1, {"nan": math.nan, "inf": math.inf, "text": "no number"}, 0.0)
    writer.close()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()[1:]]
    assert math.isnan(float(rows[0]["value"]))
    assert float(rows[1]["value"]) == math.inf
    assert len(rows) == 2


def test_init_twice_is_an_error(tmp_path, tracker):
    args = run_args(run_dir=str(tmp_path))
    logging_utils.init_tracking(args)
    with pytest.raises(RuntimeError, match="twice"):
        logging_utils.init_tracking(args)
    logging_utils.finish_tracking()


def test_a_writer_that_fails_to_close_does_not_keep_others_open(tracker, caplog):
    closed = []

    class Bad:
        def write(self, *_):
            pass

        def close(self):
            closed.append("bad")
            raise OSError("disk full")

    class Good(Bad):
        def close(self):
            closed.append("good")

    tracker.open([Bad(), Good()])
    tracker.close()
    assert "closing Bad failed" in caplog.text
    assert closed == ["bad", "good"]


def test_tensorboard_holds_the_numbers(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = TensorBoardWriter(str(tmp_path))
    writer.write("train/step", 4, {"train/loss": 0.25, "note": "text"}, 12.5)
    writer.close()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    (event,) = events.Scalars("train/loss")
    assert (event.step, event.value, event.wall_time) == (4, 0.25, 12.5)


def test_tensorboard_directory(monkeypatch):
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    with pytest.raises(ValueError, match="--tb-project-name"):
        tracking.tensorboard_dir(run_args())
    named = run_args(tb_project_name="p", tb_experiment_name="e")
    assert tracking.tensorboard_dir(named) == "tensorboard_log/p/e"
    monkeypatch.setenv("TENSORBOARD_DIR", "/elsewhere")
    assert tracking.tensorboard_dir(named) == "/elsewhere"


def test_wandb_configuration_has_no_secrets(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    config = wandb_config(
        types.SimpleNamespace(
            wandb_key="w", sglang_api_key="s", input_key="messages", lr=0.1, path=object,
            rm_url="https://u:hush@h", train_env_vars={"OPENAI_KEY": "o"}, deep=[{"jwt": "j"}],
            role_values={"critic": {"lr": 0.2}},
        )
    )  # fmt: skip
    assert config["wandb_key"] == config["sglang_api_key"] == "***"
    assert config["input_key"] == "messages"
    assert (config["rm_url"], config["train_env_vars"]) == ("https://***@h", {"OPENAI_KEY": "***"})
    assert config["deep"] == [{"jwt": "***"}]
    assert config["env_vars"] == {"SLURM_JOB_ID": "42"}
    assert (config["lr"], config["critic/lr"], config["critic/wandb_key"]) == (0.1, 0.2, "***")
    assert "role_values" not in config
    assert isinstance(config["path"], str)


@pytest.mark.slow
def test_wandb_offline_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    args = run_args(wandb_mode="offline", wandb_dir=str(tmp_path), wandb_group="g", wandb_project="p")
    writer = WandbWriter(args)
    try:
        assert wandb.run.offline
        assert wandb.run.group.startswith("g_")
        assert wandb.run.name == f"{wandb.run.group}-RANK_0"
        writer.write("train/step", 3, {"train/loss": 0.5}, 0.0)
        assert wandb.run.summary["train/loss"] == 0.5
        assert wandb.run.summary["train/step"] == 3
    finally:
        writer.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_a_later_start_in_the_same_run_directory_is_the_same_run_for_the_trackers(tmp_path, tracker, monkeypatch):
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    opened = []

    class Wandb:
        def __init__(self, args: Any) -> None:
            opened.append(args.wandb_run_id)
            args.wandb_run_id = args.wandb_run_id or f"id-{len(opened)}"

        def close(self) -> None:
            pass

    monkeypatch.setattr(logging_utils, "WandbWriter", Wandb)

    def start(run_dir: str, **changes: Any) -> None:
        args = run_args(run_dir=str(tmp_path / run_dir), use_wandb=True, use_tensorboard=True, **changes)
        logging_utils.init_tracking(args)
        logging_utils.finish_tracking(args)

    names = {"tb_project_name": "p", "wandb_project": "w"}
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    for moment in ("20260101-000000", "20260101-000001", "20260101-000002"):
        monkeypatch.setattr("time.strftime", lambda *_, now=moment: now)
        start("one", **names)
    start("two", **names)
    start("one", **{**names, "wandb_project": "another"})
    start("one", **names, wandb_run_id="given")
    assert opened == [None, "id-1", "id-1", None, None, "given"]
    directories = sorted(path.name for path in (tmp_path / "tensorboard_log" / "p").iterdir())
    assert directories == ["20260101-000000", "20260101-000002"]  # of run one, of run two
