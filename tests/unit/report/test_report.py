"""The report shows what the run directory holds, whatever state the run is in, and loads nothing from elsewhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from slime.report.__main__ import main
from slime.report.page import (
    MAX_POINTS,
    Run,
    Series,
    arrange,
    curve,
    duration,
    embed,
    page_data,
    read_run,
    tiles,
    write_report,
)


def line(name, step, value, step_key="rollout/step", time=0.0):
    return json.dumps({"step_key": step_key, "step": step, "name": name, "value": value, "time": time}) + "\n"


@pytest.fixture
def run_dir(tmp_path):
    metrics = "".join(line("rollout/raw_reward", i, i / 4, time=10.0 * i) for i in range(3))
    metrics += line("eval/addition", 0, 0.25, "eval/step") + line("eval/addition", 2, 0.75, "eval/step")
    metrics += line("eval/addition-truncated_ratio", 0, 0.5, "eval/step")
    metrics += (
        line("perf/stage/generate_time", 0, 1.5) + line("perf/actor_train_time", 0, 2.5) + line("odd/metric", 0, 1)
    )
    metrics += line("train/kl_loss", 0, "nan", "train/step") + '{"step_key": "train/st'
    (tmp_path / "metrics.jsonl").write_text(metrics)
    (tmp_path / "samples").mkdir()
    for name, reward in (("0", 0.0), ("10", 1.0), ("2", 0.5), ("eval-2", 1.0)):
        row = {
            "prompt": "1+1=",
            "response": "</script><script>alert(1)</script>",
            "reward": reward,
            "status": "completed",
        }
        (tmp_path / "samples" / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "config.yaml").write_text("lr: 0.001\nnote: <b>&\n")
    (tmp_path / "command.txt").write_text("train.py --lr 0.001\n")
    (tmp_path / "versions.json").write_text(json.dumps({"python": "3.11", "packages": {"torch": "2.13.0"}}))
    return tmp_path


def data_of(page):
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)[1])


def test_everything_is_on_the_page(run_dir):
    page = write_report(run_dir).read_text()
    data = data_of(page)
    curves = {s["name"]: s for chart in data["charts"] for s in chart["series"]}
    assert curves["rollout/raw_reward"]["y"] == [0.0, 0.25, 0.5]
    assert curves["eval/addition"]["x"] == [0, 2]
    assert curves["train/kl_loss"]["y"] == [None]
    assert [s["name"] for s in data["others"]] == ["eval/addition-truncated_ratio", "odd/metric"]
    assert [(s["rollout"], s["eval"]) for s in data["samples"]] == [(0, False), (2, False), (2, True), (10, False)]
    assert "note: &lt;b&gt;&amp;" in page
    assert "train.py --lr 0.001" in page
    assert "<td>torch</td><td>2.13.0</td>" in page
    assert "1 lines could not be read" in page


def test_the_page_is_self_contained_and_samples_cannot_break_out(run_dir):
    page = write_report(run_dir).read_text()
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    assert not re.search(r'(?:src|href)\s*=\s*["\'](?!#)', page)
    assert "@import" not in page
    assert not re.search(r"\$[a-z]", page.split("<script")[0])
    assert data_of(page)["samples"][0]["response"] == "</script><script>alert(1)</script>"


def test_embedding_is_reversible():
    text = "</script> & <!-- \u2028 \u00e9"
    assert json.loads(embed({"t": text})) == {"t": text}
    assert not set(embed({"t": text})) & set("<>&\u2028")


def test_a_resumed_step_counts_once_and_the_later_value_holds(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(line("a", 1, 1.0) + line("a", 2, 2.0) + line("a", 1, 9.0))
    series = read_run(tmp_path).series["a"]
    assert (series.steps, series.values) == ([1, 2], [9.0, 2.0])


def test_headline_numbers(run_dir):
    found = {t["label"]: t["value"] for t in tiles(read_run(run_dir))}
    assert found == {
        "eval/addition": "0.25 → 0.75",
        "rollout/raw_reward": "0 → 0.5",
        "rollouts": "3",
        "first to last metric": "20 s",
    }
    assert [duration(s) for s in (59.4, 61, 3725)] == ["59 s", "1 min 01 s", "1 h 02 min"]


def test_every_metric_is_shown_exactly_once():
    names = [
        "train/loss",
        "train/pg_loss",
        "perf/stage/eval_time",
        "perf/train_wait_time",
        "x/y",
        "eval/a",
        "eval/a-pass@1",
        "rollout/engines/judge/lost",
        "rollout/engines/lost",
    ]
    placed, others = arrange(names)
    shown = [name for _, group in placed for name in group] + others
    assert sorted(shown) == sorted(names)
    assert {c.title: group for c, group in placed} == {
        "Evaluation": ["eval/a"], "Loss": ["train/loss", "train/pg_loss"], "Pass rate": ["eval/a-pass@1"],
        "Time per stage": ["perf/stage/eval_time"], "Engines": ["rollout/engines/lost"],
        "Engines of each model": ["rollout/engines/judge/lost"],
    }  # fmt: skip


def test_long_curves_are_thinned_but_keep_their_ends():
    n = 5 * MAX_POINTS
    thin = curve(Series("a", "s", list(range(n)), [float(i) for i in range(n)], [0.0] * n))
    assert len(thin["x"]) == MAX_POINTS
    assert (thin["x"][0], thin["x"][-1]) == (0, n - 1)
    assert all(x == pytest.approx(y, rel=1e-5) for x, y in zip(thin["x"], thin["y"], strict=True))


def test_an_empty_run_has_a_page(tmp_path):
    (tmp_path / "config.yaml").write_text("lr: 1\n")
    assert data_of(write_report(tmp_path, tmp_path / "out" / "r.html").read_text()) == page_data(Run(tmp_path))


def test_wrong_directories_are_named(tmp_path, capsys, run_dir):
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "is not a directory" in capsys.readouterr().err
    parent = tmp_path / "runs"
    shutil.copytree(run_dir, parent / "run-1", ignore=shutil.ignore_patterns("runs"))
    assert main([str(parent)]) == 2
    assert "run-1" in capsys.readouterr().err
    assert main([str(parent / "run-1")]) == 0
    assert capsys.readouterr().out.strip() == str(parent / "run-1" / "report.html")


@pytest.mark.skipif(not shutil.which("node"), reason="the script's syntax is checked with node, which is not installed")
def test_the_script_parses(tmp_path):
    from importlib import resources

    script = tmp_path / "report.js"
    script.write_text((resources.files("slime.report") / "assets" / "report.js").read_text())
    subprocess.run(["node", "--check", str(script)], check=True, timeout=60)


def test_half_of_a_surrogate_pair_does_not_break_the_page(run_dir):
    row = {"prompt": "\ud83d", "response": "?", "reward": 1.0, "status": "completed"}
    (run_dir / "samples" / "3.jsonl").write_text(json.dumps(row) + "\n")
    write_report(run_dir, run_dir / "page.html")
    assert "\\ud83d" in (run_dir / "page.html").read_text()
