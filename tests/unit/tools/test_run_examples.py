"""One command runs examples with their controls, and the table of what they learned has both."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.example_results import change, check_exchanged, check_result
from tools import gen_examples_doc, run_examples


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty page and no results, and runs that learn unless they are of multi_agent."""
    monkeypatch.setattr(run_examples, "ROOT", tmp_path)
    monkeypatch.setattr(gen_examples_doc, "RESULTS", tmp_path / "results.jsonl")
    monkeypatch.setattr(gen_examples_doc, "PAGE", tmp_path / "page.md")
    (tmp_path / "results.jsonl").write_text("")
    (tmp_path / "page.md").write_text("<!-- results: begin -->\n<!-- results: end -->\n")

    def ran(command: list[str], **options: Any) -> SimpleNamespace:
        name, shuffled = command[2].split(".")[1], "--shuffled-rewards" in command
        seed, root = int(command[command.index("--seed") + 1]), Path(command[command.index("--dir") + 1])
        run_dir = root / ("grpo_shuffled" if shuffled else "grpo")
        run_dir.mkdir(parents=True)
        result = {"example": name, "seed": seed, "shuffled": shuffled, "rollouts": 5, "before": {"d": 0.2},
                  "after": {"d": 0.2 if shuffled else 0.8}, "targets": {"d": 0.7},
                  "seconds": {"sft": 60.0}, "cores": 2}  # fmt: skip
        (run_dir / "result.json").write_text(json.dumps(result))
        return SimpleNamespace(returncode=int(name == "multi_agent"))

    monkeypatch.setattr(run_examples.subprocess, "run", ran)
    return tmp_path / "page.md"


def test_examples_and_their_controls(page, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run_examples", "multi_agent", "retool", "--seeds", "0", "3"])
    assert run_examples.main() == 1
    assert "failed: multi_agent (seed 0), multi_agent (seed 3)" in capsys.readouterr().err
    link = "[retool](../../examples/retool/README.md)"
    assert page.read_text().splitlines()[3:-1] == [
        f"| {link} | `d` | {seed} | 5 | 20.0% | 80.0% | 70% | 20.0% after 5 | 1.0 on 2 |" for seed in (0, 3)
    ]


def test_an_example_that_does_not_exist(page, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run_examples", "quickstart"])
    with pytest.raises(SystemExit):
        run_examples.main()
    assert "quickstart is no example with a small version; those are adaptive_environments, " in capsys.readouterr().err


def test_what_is_recorded_was_learned_from_the_rewards() -> None:
    """And controls learn nothing on average, of which noise of twice the standard error is no sign of either."""
    results = gen_examples_doc.read()
    controls = {one["example"]: one for one in results if one["shuffled"]}
    drifts = []
    for one in results:
        for data_set, before in one["before"].items():
            if data_set == "exchanged":
                check_exchanged(one)
                continue
            if before > 0.9:
                continue  # there to be forgotten, not learned
            if one["shuffled"]:
                drifts.append(change(one, data_set))
            else:
                check_result(one, controls[one["example"]], data_set)
    assert statistics.mean(drifts) <= 2 * statistics.stdev(drifts) / len(drifts) ** 0.5
