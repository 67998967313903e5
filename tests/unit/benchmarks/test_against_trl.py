"""The table that ``benchmarks.against_trl`` makes from the rows of both sides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import against_trl, trl_side
from benchmarks.against_trl import Shape, check_lengths, crossing, in_turns, our_curve, spread, throughput_flags
from benchmarks.loop_profile import (
    KINDS,
    CpuSampler,
    Row,
    Step,
    format_table,
    kind_of,
    read_rows,
    read_steps,
    stage_table,
    value_at,
)
from examples.quickstart.recipe import Paths
from slime.arguments import parse_args
from tests.support.arguments import CONFIG


def row(step: int, name: str, value: float, at: float) -> dict[str, Any]:
    axis = "eval/step" if name.startswith("eval/") else "rollout/step"
    return {"step_key": axis, "step": step, "name": name, "value": value, "time": at}


def step_rows(step: int, ended: float) -> list[dict[str, Any]]:
    """A step of 10 s: 5 of generation, 3 of training, 1 of the weight push, 1 between them."""
    return [
        row(step, "perf/rollout_time", 4.5, ended - 4),
        row(step, "rollout/response_len/min", 64, ended - 4),
        row(step, "rollout/response_len/max", 64, ended - 4),
        row(step, "perf/data_preprocess_time", 0.1, ended - 2),
        row(step, "perf/actor_train_time", 2.4, ended - 2),
        row(step, "perf/stage/sync_weights_time", 1.0, ended),
        row(step, "perf/stage/generate_time", 5.0, ended),
        row(step, "perf/stage/train_time", 3.0, ended),
    ]


@pytest.fixture
def steps() -> list[Step]:
    return read_steps([r for k in range(3) for r in step_rows(k, 100.0 + 10 * k)])


class TestSteps:
    def test_a_step_begins_where_the_one_before_it_ended(self, steps: list[Step]) -> None:
        assert [(s.number, s.began, s.ended) for s in steps] == [(0, 91.0, 100.0), (1, 100.0, 110.0), (2, 110.0, 120.0)]

    def test_stages_follow_one_another(self, steps: list[Step]) -> None:
        spans = {"generate": (100.0, 105.0), "train": (105.0, 108.0), "sync_weights": (108.0, 109.0)}
        assert steps[1].spans() == spans

    def test_a_step_without_its_stages_is_not_complete(self) -> None:
        assert read_steps(step_rows(0, 100.0)[:4]) == []

    def test_half_a_line_is_left_for_later(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        assert read_rows(path) == []
        path.write_text('{"step": 1}\n{"step"')
        assert read_rows(path) == [{"step": 1}]

    def test_answers_of_another_length_are_refused(self, steps: list[Step]) -> None:
        check_lengths(Shape(32, 64), steps, 3)
        with pytest.raises(RuntimeError, match=r"32 answers x 65 tokens.*\[64\.0\]"):
            check_lengths(Shape(32, 65), steps, 3)
        with pytest.raises(RuntimeError, match="expected 4 steps"):
            check_lengths(Shape(32, 64), steps, 4)


def table_of(steps: list[Step]) -> dict[str, tuple[float, dict[str, float] | None]]:
    """The table where engines compute with a core and a half all the time, and nothing else does."""
    rows: list[Row] = stage_table(steps, lambda began, ended: {"engines": 1.5 * (ended - began), "strangers": 0.0})
    return {name.strip(): (wall, cpu) for name, wall, cpu in rows}


class TestTable:
    def test_stages_their_parts_and_the_rest_add_up(self, steps: list[Step]) -> None:
        rows = table_of(steps[1:])
        walls = {name: pytest.approx(wall) for name, (wall, _) in rows.items()}
        assert walls == {
            "generate": 5.0, "requests and rewards": 4.5, "train data, hand-over": 0.5,
            "train": 3.0, "columns to tensors": 0.1, "forward, backward, update": 2.4,
            "calls, reports, waiting for ranks": 0.5, "sync_weights": 1.0, "between the stages": 1.0, "step": 10.0,
        }  # fmt: skip

    def test_cpu_seconds_go_to_the_stage_that_ran(self, steps: list[Step]) -> None:
        rows = table_of(steps[1:])
        engines = {name: cpu["engines"] for name, (_, cpu) in rows.items() if cpu is not None}
        expected = {"generate": 7.5, "train": 4.5, "sync_weights": 1.5, "between the stages": 1.5, "step": 15.0}
        assert engines == pytest.approx(expected)

    def test_text_has_what_was_idle(self) -> None:
        text = format_table([("train", 3.0, {"trainers": 2.5}), ("  log-probs", 1.0, None)], cores=2)
        head, train, part = text.splitlines()
        assert head.split() == ["seconds", "per", "step", "wall", *KINDS, "strangers", "idle"]
        assert train.split() == ["train", "3.000", "0.000", "0.000", "0.000", "2.500", "0.000", "0.000", "3.500"]
        assert part.split() == ["log-probs", "1.000"]


class TestCpu:
    @pytest.mark.parametrize(
        ("command", "kind"),
        [
            ("sglang::scheduler", "engines"), ("python -m sglang.launch_server --port 1", "engines"),
            ("sglang::router", "router"), ("ray::RolloutManager.generate", "manager"),
            ("ray::TrainRayActor", "trainers"), ("ray::EngineActor", "others"), ("python train.py", "others"),
        ],
    )  # fmt: skip
    def test_kinds_of_processes(self, command: str, kind: str) -> None:
        assert kind_of(command) == kind

    def test_value_between_and_outside_of_samples(self) -> None:
        times, values = [1.0, 2.0, 4.0], [0.0, 1.0, 5.0]
        assert [value_at(times, values, at) for at in (0.0, 1.5, 3.0, 9.0)] == [0.0, 0.5, 3.0, 5.0]

    def test_counts_processes_with_the_tag_by_kind_also_after_their_end(self) -> None:
        code = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\nsys.stdin.read()"
        sampler = CpuSampler(f"TEST_TAG={os.getpid()}", look_s=0)
        env = {**os.environ, "TEST_TAG": str(os.getpid())}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        sampler.sample()
        with subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code, "ray::RolloutManager"], env=env, **pipes
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdout.readline()
            sampler.sample()
            child.stdin.close()  # a process that has ended has no command line until its owner looks
            while Path(f"/proc/{child.pid}/cmdline").read_bytes():
                time.sleep(0.01)
            sampler.sample()
        sampler.sample()
        found = sampler.between(sampler.times[0], sampler.times[-1])
        assert 0.25 <= found["manager"] < 5
        assert found["engines"] == found["others"] == found["trainers"] == 0


class TestFigures:
    def test_shapes(self) -> None:
        assert Shape.parse("256x64") == Shape(256, 64)
        assert str(Shape(32, 64)) == "32 answers x 64 tokens"
        for text in ("30x64", "32x0", "-8x4"):
            with pytest.raises(ValueError, match="expected ANSWERSxTOKENS"):
                Shape.parse(text)

    def test_spread_is_the_median_and_the_range(self) -> None:
        assert spread([0.5, 0.4, 0.9]) == "0.50 (0.40 to 0.90)"
        assert spread([1140.4, 2290.0, 900.0]) == "1,140 (900 to 2,290)"

    def test_sides_take_turns(self) -> None:
        order: list[str] = []
        sides = {name: lambda name=name: order.append(name) for name in ("a", "b")}
        for repeat in range(3):
            in_turns(repeat, sides)
        assert order == ["a", "b", "b", "a", "a", "b"]

    def test_crossing(self) -> None:
        points = [(0.0, 0.5), (10.0, 0.7), (20.0, 0.9), (30.0, 0.7), (40.0, 0.9)]
        assert crossing(points, 0.8) == pytest.approx(15.0)
        assert crossing(points, 0.5) == 0.0
        assert crossing(points, 0.95) is None
        assert crossing([], 0.8) is None

    def test_our_curve_leaves_evaluations_out(self) -> None:
        rows = [
            row(0, "eval/addition", 0.5, 100.0), row(0, "perf/stage/eval_time", 7.0, 102.0),
            row(4, "eval/addition", 0.6, 113.0), row(4, "perf/stage/eval_time", 3.0, 113.1),
            row(9, "eval/addition", 0.8, 126.0), row(9, "perf/stage/eval_time", 3.0, 126.1),
            row(14, "eval/addition", 0.9, 139.0),
        ]  # fmt: skip
        assert our_curve(rows, "addition") == [(0.0, 0.5), (10.0, 0.6), (20.0, 0.8)]
        assert our_curve([], "addition") == []


class TestSides:
    def test_our_flags_are_accepted(self, tmp_path: Path) -> None:
        paths = Paths(tmp_path)
        paths.model.mkdir()
        (paths.model / "config.json").write_text(json.dumps(CONFIG))
        paths.data.mkdir()
        (paths.data / "train.jsonl").write_text('{"messages": [{"role": "user", "content": "1+1="}], "label": "2"}\n')
        args = parse_args(throughput_flags(paths, Shape(64, 256), 12))
        assert (args.global_batch_size, args.rollout_batch_size, args.num_rollout) == (64, 8, 12)
        assert args.sglang_preferred_sampling_params == {"ignore_eos": True}
        assert (args.lr, args.rollout_max_response_len) == (against_trl.LR, 256)

    def test_trl_gets_the_same_numbers(self) -> None:
        config = {
            "task": False, "output_dir": "", "seed": 1, "answers": 512, "steps_per_generation": 2, "group": 8,
            "length": 64, "steps": 12, "lr": 1e-4, "lr_scheduler": "constant", "warmup_steps": 0, "kl": 0.0,
        }  # fmt: skip
        found = trl_side.settings(config)
        assert found["per_device_train_batch_size"] == 256
        assert found["generation_kwargs"] == {"min_new_tokens": 64}
        assert trl_side.settings({**config, "task": True})["generation_kwargs"] is None

    def test_the_task_has_the_quickstarts_numbers(self, tmp_path: Path) -> None:
        config = against_trl.trl_task(Paths(tmp_path), seed=1)
        assert (config["answers"], config["group"], config["length"], config["steps"]) == (512, 8, 6, 200)
        assert (config["lr"], config["kl"], config["warmup_steps"], config["seed"]) == (1.5e-4, 0.15, 10, 1235)
        found = trl_side.settings({**config, "output_dir": ""})
        assert (found["per_device_train_batch_size"], found["steps_per_generation"]) == (256, 2)
        flags = against_trl.task_flags(Paths(tmp_path), seed=1)
        assert "--run-dir" not in flags
        assert flags[flags.index("--eval-interval") + 1] == "5"

    def test_rewards(self) -> None:
        assert trl_side.digit_share("a1b2", 4) == 0.5
        assert trl_side.digit_share("", 0) == 0.0
        assert trl_side.right([1, 2, 9], "052", "052", [9]) == 1.0
        assert trl_side.right([1, 2], "052", "052", [9]) == 0.0
        assert trl_side.right([1, 9], "051", "052", [9]) == 0.0

    def test_rows_of_trl_start_again_after_a_step(self, tmp_path: Path) -> None:
        rows = trl_side.Rows(str(tmp_path / "rows.jsonl"))
        assert rows.timed("generation", lambda value: value, 7) == 7
        rows.tokens, rows.rewards = [3, 5], [0.0, 1.0]
        rows.write_step(1)
        rows.write_step(2)
        first, second = read_rows(tmp_path / "rows.jsonl")
        assert (first["tokens"], first["shortest"], first["longest"], first["reward"]) == (8, 3, 5, 0.5)
        assert first["generation"] >= 0
        assert (second["tokens"], "generation" in second) == (0, False)

    def test_table_of_trl(self) -> None:
        rows = [{"time": 10.0 + 2 * k, "cpu": 3.0 * k, "generation": 1.5, "rewards": 0.1} for k in range(3)]
        *_, training, whole = against_trl.trl_table(rows[0], rows[1:]).splitlines()
        assert training.split() == ["training,", "rest", "0.400"]
        assert whole.split() == ["step", "2.000", "3.000"]
