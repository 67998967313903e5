"""The quickstart's data, reward, control and stages, without the loop."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import statistics
import sys
import time
import types
from pathlib import Path

import pytest

from examples.quickstart import make_data, recipe, reward, stages
from examples.quickstart import run as quickstart
from examples.quickstart.stages import StageError, run_stage, show_command
from slime.arguments import parse_args
from slime.arguments.rules.roles import role_args
from slime.utils.types import Sample


def total(question):
    a, b = question.rstrip("=").split("+")
    return int(a) + int(b)


def test_the_held_out_problems_are_in_no_training_file(tmp_path):
    make_data.make_data(tmp_path, seed=3, demonstrations=5000, slips=0.6, held_out=512)
    rows = {f.stem: [json.loads(x) for x in f.read_text().splitlines()] for f in tmp_path.glob("*.jsonl")}
    asked = {name: [row["messages"][0]["content"] for row in group] for name, group in rows.items()}
    assert len(set(asked["held_out"])) == 512
    assert not set(asked["held_out"]) & (set(asked["train"]) | set(asked["sft"]))
    assert all(int(r["label"]) == total(r["messages"][0]["content"]) for r in rows["train"] + rows["held_out"])
    demonstrated = [(total(r["messages"][0]["content"]), int(r["messages"][1]["content"])) for r in rows["sft"]]
    wrong = sum(right != shown for right, shown in demonstrated)
    assert 0.57 <= wrong / 5000 <= 0.63  # 0.6 and four standard deviations


def test_the_split_is_the_same_for_every_seed(tmp_path):
    for seed in (0, 1):
        make_data.make_data(tmp_path / str(seed), seed=seed, demonstrations=10, slips=0.6, held_out=100)
    first, second = (tmp_path / str(s) for s in (0, 1))
    assert (first / "held_out.jsonl").read_text() == (second / "held_out.jsonl").read_text()
    assert (first / "sft.jsonl").read_text() != (second / "sft.jsonl").read_text()


@pytest.mark.parametrize(
    ("response", "status", "expected"),
    [
        ("095<|im_end|>", Sample.Status.COMPLETED, 1.0),
        ("095", Sample.Status.COMPLETED, 1.0),
        ("095", Sample.Status.TRUNCATED, 0.0),
        ("95<|im_end|>", Sample.Status.COMPLETED, 0.0),
        ("0955<|im_end|>", Sample.Status.COMPLETED, 0.0),
        ("", Sample.Status.COMPLETED, 0.0),
    ],
)
def test_only_the_exact_finished_answer_is_rewarded(response, status, expected):
    sample = Sample(prompt="37+58=", response=response, label="095", status=status)
    assert asyncio.run(reward.exact_answer(None, sample)) == expected


def test_shuffled_rewards_keep_the_numbers_but_not_their_owners():
    samples = [Sample(index=i, group_index=i // 4, reward=float(i % 2)) for i in range(40)]
    raw, normalized = reward.shuffled_rewards(None, samples)
    assert raw == [s.reward for s in samples]
    for group in range(10):
        dealt = normalized[4 * group : 4 * group + 4]
        assert sum(dealt) == pytest.approx(0, abs=1e-9)
        if any(dealt):
            assert statistics.stdev(dealt) == pytest.approx(1, abs=1e-4)
    punished = sum(raw[i] == 1.0 and normalized[i] < 0 for i in range(40))
    assert 4 <= punished <= 16  # 20 are right; by chance half of them are dealt a zero
    assert reward.shuffled_rewards(None, samples)[1] == normalized


@pytest.fixture
def paths(tmp_path):
    """A quickstart's directory with the model after SFT, and data, by name only."""
    paths = recipe.Paths(tmp_path)
    for directory in (paths.model, paths.sft_model):
        directory.mkdir(parents=True)
        config = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 512}
        config |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 384}
        config |= {"rms_norm_eps": 1e-6, "max_position_embeddings": 1024, "tie_word_embeddings": True}
        (directory / "config.json").write_text(json.dumps(config | {"rope_theta": 10000.0}))
    paths.data.mkdir(parents=True)
    for name in ("sft", "train", "held_out"):
        (paths.data / f"{name}.jsonl").touch()
    return paths


def test_the_command_lines_are_accepted_by_train_py(paths):
    sft = parse_args(recipe.sft(paths, 0))
    assert sft.num_rollout * sft.rollout_batch_size == recipe.SFT_ROLLOUTS * recipe.SFT_BATCH
    grpo = parse_args(recipe.grpo(paths, 1, rollouts=60, shuffled=True))
    assert (grpo.num_rollout, grpo.rollout_num_gpus) == (60, 2)
    assert grpo.custom_reward_post_process_path == "examples.quickstart.reward.shuffled_rewards"
    ppo = parse_args(recipe.ppo(paths, 1, rollouts=60))
    assert (ppo.num_rollout, ppo.use_critic, ppo.num_critic_only_steps) == (60, True, 5)
    assert role_args(ppo, "critic").lr == 1e-3
    lora = parse_args(recipe.grpo(paths, 1, rollouts=60, shuffled=False, lora_rank=8))
    assert (lora.lora_rank, lora.lora_sync, lora.lr) == (8, "adapter", 1.5e-3)
    assert Path(lora.run_dir).name == "grpo_lora8"


@pytest.mark.parametrize("rollouts", [1, 2, 5, 10])
def test_few_rollouts_are_warmed_up_and_evaluated_at_both_ends(paths, rollouts):
    for flags in (recipe.grpo(paths, 0, rollouts=rollouts, shuffled=False), recipe.ppo(paths, 0, rollouts=rollouts)):
        args = parse_args(flags)
        assert rollouts % args.eval_interval == 0
        assert args.lr_warmup_iters < 2 * rollouts
        assert getattr(args, "num_critic_only_steps", 0) < rollouts


def test_a_second_run_in_a_directory_has_metrics_of_its_own(paths):
    """Those of the first are neither printed again nor counted as its evaluations."""

    def directory():
        return Path(parse_args(recipe.grpo(paths, 0, rollouts=5, shuffled=False)).run_dir)

    assert directory() == paths.grpo(False)
    rows = [{"name": "eval/addition", "step": step, "value": 0.5} for step in (0, 9)]
    paths.grpo(False).mkdir()
    (paths.grpo(False) / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert directory() == paths.root / "grpo-2"
    directory().mkdir()
    assert directory() == paths.root / "grpo-3"
    assert quickstart.accuracy(paths.grpo(False)) == [(0, 0.5), (9, 0.5)]


def test_the_bytes_of_the_last_push_are_those_of_the_metric(tmp_path):
    rows = [{"name": "perf/update_weights_wire_bytes", "step": step, "value": 100.0 + step} for step in (0, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert quickstart.last_push(tmp_path) == 101


def test_what_it_says_about_time_counts_only_what_is_left_to_do(paths, tmp_path):
    def estimate(*args):
        text = quickstart.expected_time(*args)
        return int(re.search(r"about (\d+) min", text).group(1))

    fresh = recipe.Paths(tmp_path / "elsewhere")
    assert (
        estimate(fresh, recipe.GRPO_ROLLOUTS, "grpo")
        > estimate(paths, recipe.GRPO_ROLLOUTS, "grpo")
        > estimate(paths, 5, "grpo")
    )


def test_a_shown_command_can_be_pasted():
    many = [f"--x{i}" for i in range(30)]
    command = ["python", "train.py", "--a", "1", "--path", "out/{rollout_id}", "--flag", *many]
    text = show_command(command)
    assert shlex.split(text.replace("\\\n", "")) == command
    assert max(map(len, text.splitlines())) < 120
    assert show_command(["python", "-m", "tools.lock", "--out", "a b"]) == "python -m tools.lock --out 'a b'"


def test_a_stage_that_fails_shows_the_end_of_its_log(tmp_path):
    with pytest.raises(StageError, match=r"(?s)SFT failed with exit status 3.*the reason"):
        run_stage("SFT", ["python", "-c", "print('the reason'); raise SystemExit(3)"], tmp_path / "log", deadline_s=60)


@pytest.mark.slow
def test_a_stage_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "GRACE_S", 1)
    now, log, end = [0.0], tmp_path / "log", time.monotonic() + 60

    def sleep(seconds):
        """Time stands still until the stage is up, however long its process takes to start."""
        time.sleep(0.02)
        assert time.monotonic() < end
        now[0] += 5 if log.exists() and "up" in log.read_text() else 0

    monkeypatch.setattr(stages, "time", types.SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    with pytest.raises(StageError, match=r"(?s)GRPO was not done after 1 s.*up"):
        run_stage("GRPO", ["python", "-c", code], log, deadline_s=1)


@pytest.mark.slow
def test_a_stage_reports_new_metrics_once(tmp_path, capsys):
    metrics = tmp_path / "metrics.jsonl"
    code = (
        "import sys, time\n"
        "f = open(sys.argv[1], 'w')\n"
        "for i in range(3): f.write('{\"value\": %d}\\n' % i); f.flush(); time.sleep(0.4)\n"
        "f.write('{\"value\"')"
    )
    command = [sys.executable, "-c", code, str(metrics)]
    run_stage(
        "x", command, tmp_path / "log", deadline_s=60, metrics=metrics, describe=lambda row: f"got {row['value']}"
    )
    printed = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  got")]
    assert printed == ["got 0", "got 1", "got 2"]
