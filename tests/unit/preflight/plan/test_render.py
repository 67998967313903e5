"""The page of ``--dry-run``: what it says of typical command lines, its shape, and what it does not need."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from argparse import Namespace
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from slime.arguments import ArgumentError
from slime.preflight.plan import plan
from slime.preflight.plan.memory_text import warning_of_this_machine
from slime.preflight.plan.render import plan_text, sections, summary_text
from tests.support.arguments import dry
from tests.support.command_lines import command_lines as random_command_lines
from tests.support.plan_pages import PAGES, command_lines, page, resolved

WIDEST = 120


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize("name", command_lines())
def test_pages_of_typical_command_lines(name: str) -> None:
    """After a change that is meant: ``python -m tests.support.plan_pages``, and read the difference."""
    assert page(command_lines()[name]).splitlines() == (PAGES / f"{name}.txt").read_text().splitlines()


@pytest.mark.parametrize("name", command_lines())
def test_nothing_is_too_wide(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PAGES.parents[3])
    too_wide = [line for line in summary_text(resolved(command_lines()[name])).splitlines() if len(line) > WIDEST]
    assert too_wide == []


def run(*flags: Any) -> str:
    """The summary of a small run that is accepted without warnings, and ``flags``."""
    quiet = ["--rm-type", "math", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "64"]
    return summary_text(dry(*quiet, *flags), overlap=False)


def test_the_configuration_comes_first_and_is_yaml(tmp_path: Any) -> None:
    args = dry("--num-rollout", "7", "--dry-run=full")
    text = plan_text(args, overlap=False)
    configuration, summary = text.split("-" * 108)
    assert yaml.safe_load(configuration)["data"]["num_rollout"] == 7
    assert summary.strip() == summary_text(args, overlap=False)
    titles = [line for line in summary.splitlines() if line and not line.startswith(" ")]
    assert titles[:7] == ["Given", "Model", "Derived", "Loop", "Batches", "Placement", "Memory"]


def test_without_the_word_full_only_what_follows_from_the_flags_is_printed() -> None:
    text = plan_text(dry("--num-rollout", "7"), overlap=False)
    titles = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert titles[:5] == ["Model", "Loop", "Batches", "Placement", "Memory"]
    assert not {"Given", "Derived"} & set(titles)
    assert len(text.splitlines()) < 110


def test_secrets_are_not_shown() -> None:
    text = plan_text(dry("--sglang-api-key", "hush-engine", "--wandb-key", "hush-tracker", "--dry-run=full"))
    assert "hush" not in text
    assert "--wandb-key ***" in text


def test_what_a_rule_replaces_is_shown_as_it_was_given(tmp_path: Any) -> None:
    """--load names a directory that the run's saves will make; until then training starts from the checkpoint."""
    args = dry("--load", tmp_path / "mine", "--save", tmp_path / "mine", "--dry-run=full")
    assert args.load == args.hf_checkpoint
    words = dict(_words(section, summary_text(args)) for section in ("Given", "Derived"))
    assert f"--load {tmp_path}/mine" in words["Given"]
    assert f"--load {args.load}" in words["Derived"]


def _words(section: str, text: str) -> tuple[str, str]:
    body = text.split(f"\n{section}\n")[-1] if not text.startswith(section) else text
    return section, " ".join(body.split("\n\n")[0].split())


def last_line(text: str) -> str:
    return text.splitlines()[-1]


def test_what_a_real_run_would_do(tmp_path: Any) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input": "1+1="}\n')
    here = ("--prompt-data", prompts)
    fits = "It fits on GPUs from 24 GB, by the estimate above."
    assert last_line(run(*here)) == f"A real run would start. {fits}"
    assert last_line(run(*here, "--http-proxy", "p")) == f"A real run would start with 1 warning. {fits}"
    absent = run("--prompt-data", tmp_path / "none.jsonl")
    assert absent.splitlines()[-2].startswith("A real run would start, if everything is")
    assert run(*here, "--cache-mla-latents").splitlines()[-2:] == [
        "A real run would be refused:",
        "  - --cache-mla-latents is not available yet in this version; leave it out",
    ]


def test_only_the_gpu_that_was_named_is_in_the_table() -> None:
    text = run("--gpu-memory-gb", "80")
    assert [line.split()[0] for line in text.splitlines() if re.match(r"  \d+ GB ", line)] == ["80"]
    assert last_line(text).endswith("It fits on GPUs of 80 GB, by the estimate above.")


def test_a_run_that_fits_nowhere_would_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "slime.preflight.plan.render.fit_sentence", lambda args, found: (False, "It would run out of memory.")
    )
    assert run().splitlines()[-1] == "It would run out of memory."
    assert "would start" not in run()


def test_reasons_that_differ_in_the_flag_alone_are_one() -> None:
    words = ("--enable-cuda-graph", "--cache-mla-latents", "--update-weights-interval", "2")
    assert run(*words).splitlines()[-4:] == [
        "A real run would be refused:",
        "  - not available yet in this version; leave it out: --enable-cuda-graph, --cache-mla-latents",
        "  - --update-weights-interval 2 has no effect in train.py, which takes the weights to the engines after",
        "    every rollout; use train_async.py or leave it out",
    ]


def test_the_loop_may_refuse_too() -> None:
    args = dry("--colocate")
    assert "--colocate makes engines and trainers take turns" in plan(args, overlap=True).refused[0]
    assert plan(args, overlap=False).refused == ()
    interval = dry("--update-weights-interval", "2")
    assert plan(interval, overlap=True).refused == ()
    assert "--update-weights-interval 2 has no effect in train.py" in plan(interval, overlap=False).refused[0]


@pytest.mark.parametrize(("program", "kind"), [("train.py", "synchronous"), ("train_async.py", "asynchronous")])
def test_the_program_says_which_loop_runs(program: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"/somewhere/{program}"])
    assert plan(dry()).loop.kind == kind


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ("--debug-rollout-only", "rollout only"),
        ("--debug-train-only", "train only"),
        ("--debug-train-only --rollout-function-path slime.rollout.sft_rollout.generate_rollout "
         "--loss-type sft_loss --disable-compute-advantages-and-returns", "SFT"),
        ("--load-debug-rollout-data dumps/{rollout_id}.pt", "replay"),
        ("--num-rollout 0 --eval-interval 1 --eval-prompt-data a a.jsonl", "evaluation only"),
    ],
)  # fmt: skip
def test_other_loops(flags: str, kind: str) -> None:
    args = dry(*shlex.split(flags))
    assert plan(args, overlap=False).loop.kind == kind
    assert ("engine" in dict(plan(args).loop.rows).get("weight sync", "")) == (kind == "evaluation only")


def test_what_needs_a_gpu_is_said_in_one_line() -> None:
    assert "On a machine without GPUs a run would be refused: --bf16 needs a GPU" in run("--bf16")
    assert plan(dry()).refused_without_gpus is None


def test_the_arguments_are_left_as_they_are() -> None:
    args = dry("--colocate")
    before = {name: repr(value) for name, value in vars(args).items()}
    plan_text(args)
    assert {name: repr(value) for name, value in vars(args).items()} == before


def test_engines_across_nodes_are_a_warning() -> None:
    text = run("--rollout-num-gpus", "8", "--rollout-num-gpus-per-engine", "4")  # slots 1-4 and 5-8
    assert "engine 1 would lie across the border of two nodes" in " ".join(text.split())
    assert "would start with 1 warning" in last_line(text)


def test_clusters_of_thousands_fit_on_a_few_screens() -> None:
    words = "--actor-num-nodes 512 --actor-num-gpus-per-node 8 --tensor-model-parallel-size 2 --rollout-num-gpus 4096"
    words += " --rollout-num-gpus-per-engine 4 --rollout-batch-size 4096 --global-batch-size 4096"
    args = dry(*words.split())
    text = summary_text(args, overlap=False)
    assert len(text.splitlines()) < 120
    assert "8,192 slots on 1,024 nodes of 8 slots" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["0-511", "0-4095", "0-4095", "(8", "per", "node)", "-"] in rows
    assert ["512-1023", "4096-8191", "-", "0-1023"] in rows


def test_sections_have_no_double_blank_line() -> None:
    flags = "--actor-num-nodes 4 --actor-num-gpus-per-node 8 --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping"
    text = run(*shlex.split(flags), "--rollout-batch-size", "32", "--global-batch-size", "32")
    assert "\n\n\n" not in text
    assert "pipeline     2      16  0-1" in text  # neighbors along the pipeline, so that stages are no ranges of ranks
    assert "pipeline stage" not in text


def test_slots_without_a_process_are_said() -> None:
    text = run("--rollout-external-engine-addrs", "10.0.0.1:30000", "--debug-rollout-only")
    assert "1 slot reserved, where nothing runs; the engines run elsewhere already" in " ".join(text.split())
    assert "1 slot to train, none to generate (--rollout-num-gpus 0)" in " ".join(
        run("--rollout-num-gpus", "0").split()
    )


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(random_command_lines())
def test_whatever_is_accepted_has_a_page(command_line: str) -> None:
    try:
        args = resolved(command_line)
    except ArgumentError:
        return
    planned = plan(args, overlap=False)
    for _, lines in sections(args, planned):
        assert all(len(line) <= WIDEST for line in lines)
    _check_slots(args, planned)


def _check_slots(args: Namespace, planned: Any) -> None:
    """Every slot of the run is on one node; trainers and engines are on slots that exist."""
    placement = planned.placement
    slots = [slot for node in placement.nodes for slot in node.slots]
    assert slots == list(range(placement.layout.slots))
    if placement.trainer is not None:
        assert placement.trainer.world_size == args.world_size
        assert placement.trainer.dp == args.data_parallel_size
    used = [slot for engine in placement.engines for slot in placement.engine_slots(engine)]
    assert len(used) == len(set(used))
    assert set(used) <= set(slots)
    assert len(used) + placement.idle == placement.layout.rollout_slots
    if not args.colocate and placement.trainer is not None:
        assert not set(used) & set(range(placement.layout.trainer_slots))


def test_a_dry_run_imports_no_heavy_package(tmp_path: Any) -> None:
    code = (
        "import sys\n"
        "sys.argv = ['train.py', *sys.argv[1:]]\n"
        "from slime.arguments import parse_args\n"
        "try:\n"
        "    parse_args()\n"
        "except SystemExit as end:\n"
        "    heavy = {'torch', 'ray', 'megatron', 'sglang', 'sglang_router', 'transformers', 'numpy', 'pandas'}\n"
        "    print('imported:', sorted(heavy & set(sys.modules)))\n"
        "    print('status:', end.code)\n"
    )
    words = shlex.split(command_lines()["grpo_on_one_machine"])
    done = subprocess.run(
        [sys.executable, "-c", code, "--dry-run", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[-2:] == ["imported: []", "status: 0"]
    assert "A real run would start" in done.stdout


def test_the_documentation_shows_these_pages() -> None:
    text = (PAGES.parents[3] / "docs" / "en" / "get_started" / "dry_run.md").read_text()
    shown = re.findall(r"<!-- plan: (\w+) -->\n```\n(.*?)```", text, flags=re.DOTALL)
    assert len(shown) == 2
    for name, part in shown:
        assert part in (PAGES / f"{name}.txt").read_text()


def test_gpus_of_a_cluster_that_is_joined_are_not_those_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: pytest.fail(f"{name} was asked"))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert warning_of_this_machine(dry()) is None
    monkeypatch.delenv("RAY_ADDRESS")
    assert warning_of_this_machine(dry("--ray-address", "10.0.0.1:6379")) is None
