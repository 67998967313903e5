from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time

import pytest
import yaml

from slime.arguments import dump, parse_args, to_yaml
from slime.arguments.groups import ALL_GROUPS
from slime.arguments.help import help_text
from tests.support.arguments import parse

HEAVY = ("torch", "ray", "megatron", "sglang", "sglang_router", "transformers", "numpy")


def test_help_is_grouped_with_defaults(flags):
    text = help_text(flags, width=100)
    for group in ALL_GROUPS:
        assert f"\n{group.title}:\n" in text
    assert "  --rollout-seed N\n      seed of the shuffle and of deterministic sampling (default: 42)" in text
    assert "  --offload-train / --no-offload-train\n" in text
    assert "(sets grpo_std_normalization to False)" in text.replace("\n      ", " ")
    assert "--sglang-mem-fraction-static" not in text
    described = [line for line in text.splitlines() if line.startswith("      ")]
    assert max(map(len, described)) <= 100


def test_help_of_a_word_searches_every_source(flags):
    text = help_text(flags, "mem-fraction")
    assert "--sglang-mem-fraction-static" in text
    assert "--lr" not in text
    assert "--use-tis" in help_text(flags, "tis")
    assert "advertised" not in help_text(flags, "use-tis")
    assert "no flag mentions 'xyzzy'" in help_text(flags, "xyzzy")


def test_help_all_has_every_option(flags):
    text = help_text(flags, "all")
    assert all(flag.option in text for flag in flags)


def test_help_says_what_is_not_available(flags):
    assert "not available yet: delta" in help_text(flags, "update-weight-mode")


def test_help_exits_with_0_and_shows_users_flags(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--help", "depth"])
    with pytest.raises(SystemExit) as caught:
        parse_args(add_custom_arguments=lambda p: p.add_argument("--my-depth", default=3, help="how deep") and None)
    assert caught.value.code == 0
    assert "--my-depth TEXT\n      how deep (default: 3)" in capsys.readouterr().out


def test_importing_and_parsing_loads_nothing_heavy():
    code = (
        "import sys, json, time; t = time.perf_counter()\n"
        "from tests.support.arguments import parse\n"
        "import slime.utils.arguments, slime.utils.eval_config\n"
        "from slime.arguments import to_yaml, finalize_for_device\n"
        "args = parse(); finalize_for_device(args, 'cpu'); to_yaml(args)\n"
        f"print(json.dumps([[m for m in {HEAVY} if m in sys.modules], time.perf_counter() - t]))"
    )
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded, seconds = json.loads(done.stdout)
    print(f"parsing: {seconds:.2f} s of a process of {time.perf_counter() - begin:.2f} s")
    assert loaded == []


def test_yaml_is_grouped_plain_and_masks_secrets():
    args = parse("--wandb-key", "s3cret", "--eval-prompt-data", "a", "a.jsonl", "--sglang-api-key", "hush")
    text = to_yaml(args)
    assert "s3cret" not in text
    assert "hush" not in text
    view = yaml.safe_load(text)
    assert view == dump(args)
    assert view["batches"]["rollout_batch_size"] == 4
    assert view["derived"]["eval_datasets"][0]["path"] == "a.jsonl"
    assert view["Megatron: model"]["num_layers"] == 2
    assert "hidden_dropout" not in view["Megatron: model"]


def test_the_namespace_travels_between_processes():
    args = parse("--eval-prompt-data", "a", "a.jsonl")
    assert vars(pickle.loads(pickle.dumps(args))) == vars(args)


def test_typed_view_of_a_group():
    from slime.arguments.groups import Batch

    view = Batch.of(parse("--n-samples-per-prompt", 8, "--num-steps-per-rollout", 2, "--global-batch-size", 16))
    assert (view.rollout_batch_size, view.n_samples_per_prompt, view.global_batch_size) == (4, 8, 16)
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        Batch(rollout_batch_size=0)


def test_the_reference_page_is_up_to_date():
    """Run `python -m tools.gen_arguments_doc` when this fails."""
    from slime.arguments.passthrough import catalog
    from tools.gen_arguments_doc import PAGE, render

    for source in catalog.SOURCES:
        if catalog.installed_version(source) not in (None, source.pinned):
            pytest.skip(f"{source.package} is not the pinned {source.pinned}")
    assert PAGE.read_text() == render()
