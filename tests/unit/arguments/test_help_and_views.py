from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
import time

import pytest
import yaml

from slime.arguments import dump, parse_args, to_yaml
from slime.arguments.groups import ALL_GROUPS
from slime.arguments.help import form, help_text
from tests.support.arguments import dry, parse

HEAVY = ("torch", "ray", "megatron", "sglang", "sglang_router", "transformers", "numpy")


def test_help_is_grouped_with_defaults(flags):
    text = help_text(flags, width=100)
    for group in ALL_GROUPS:
        assert f"\n{group.title}:\n" in text
    assert "  --rollout-seed N\n      seed of the shuffle and of deterministic sampling (default: 42)" in text
    assert "  --offload-train / --no-offload-train\n" in text
    assert "--sglang-mem-fraction-static" not in text
    assert "--config FILE" in text


@pytest.mark.parametrize("width", [40, 72, 100])
@pytest.mark.parametrize("topic", [None, "rollout", "--rollout-batch-size", "--data-path", "router"])
def test_help_fits_the_terminal(flags, width, topic):
    longest = max(len(word) for flag in flags for word in f"{form(flag)} {flag.help}".split())
    for line in help_text(flags, topic, width).splitlines():
        assert len(line) <= width or (len(line.strip()) <= longest and " " not in line.strip()), line


def test_help_of_a_group_shows_it_whole_and_then_what_else_has_its_name(flags):
    text = help_text(flags, "rollout", 100)
    first, _, rest = text.partition("other flags with 'rollout' in their name:")
    assert first.startswith("rollout generation:\n  --hf-checkpoint DIR")
    assert "--over-sampling-batch-size" in first
    assert "  --rollout-num-gpus N\n      inference slots" in rest
    assert "mentioned by" in rest
    assert "--eval-temperature" in rest.partition("mentioned by")[2]


def test_help_of_a_flag_tells_all_about_it(flags):
    text = help_text(flags, "--micro_batch_size", 100)
    assert text == help_text(flags, "micro-batch-size", 100)
    assert text.startswith("--micro-batch-size N\n    samples per micro-batch")
    facts = dict(line.split(maxsplit=1) for line in text.partition("\n\n")[2].partition("\n\n")[0].splitlines())
    assert facts["value"] == "an integer, at least 1"
    assert facts["default"] == "1"
    assert facts["attribute"] == "args.micro_batch_size"
    assert facts["YAML"].startswith("micro_batch_size: 1 ")
    assert facts["group"] == "batches"
    related = text.partition("related:\n")[2]
    assert "  --use-dynamic-batch-size\n" in related
    assert "  --global-batch-size N\n" in related
    assert "--sglang" not in related


def test_help_has_an_example_of_every_flag(flags):
    """The example in YAML is a value of the flag's own type."""
    for flag in flags[::40]:
        text = help_text(flags, flag.option, 200)
        assert text.startswith(form(flag)[:20])
        (example,) = (line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("  YAML "))
        value = yaml.safe_load(example.partition("   (")[0].replace("{...}", "{}"))
        assert list(value) == [flag.dest]


def test_every_flag_of_ours_is_described_and_names_only_flags_that_exist(flags):
    known = {option for flag in flags for option in flag.options}
    for flag in flags:
        if flag.source == "slime":
            assert len(flag.help.split()) >= 2, flag.option
            assert set(re.findall(r"--[a-z][\w-]*\w", flag.help)) <= known, flag.help


def test_help_of_a_word_searches_every_source(flags):
    text = help_text(flags, "mem-fraction")
    assert "--sglang-mem-fraction-static" in text
    assert "--lr" not in text
    assert "--use-tis" in help_text(flags, "tis")
    assert "advertised" not in help_text(flags, "use-tis")


def test_help_of_several_words_wants_all_of_them(flags):
    text = help_text(flags, "eval temperature")
    assert "--eval-temperature" in text
    assert "--rollout-temperature X" not in text


@pytest.mark.parametrize(
    ("topic", "suggested"),
    [
        ("temprature", "--rollout-temperature"),
        ("--rolout-batch-size", "--rollout-batch-size"),
        ("evaluatoin", "evaluation"),
        ("xyzzy", None),
    ],
)
def test_help_of_nothing_known_suggests_the_nearest(flags, topic, suggested):
    text = help_text(flags, topic)
    assert text.startswith(f"no flag mentions '{topic}'")
    assert ("the nearest are" in text) is (suggested is not None)
    assert suggested is None or suggested in text


def test_help_all_has_every_option(flags):
    text = help_text(flags, "all")
    assert all(flag.option in text for flag in flags)


@pytest.mark.parametrize("source", ["megatron", "sglang", "router"])
def test_help_of_a_package_has_its_flags_only(flags, source):
    text = help_text(flags, source)
    shown = {line.split()[0].rstrip(",") for line in text.splitlines() if line.startswith("  --")}
    assert shown == {flag.option for flag in flags if flag.source == source}


@pytest.mark.parametrize(
    ("option", "written"),
    [
        ("--lr", "--lr X"),
        ("--save", "--save DIR"),
        ("--run-dir", "--run-dir DIR"),
        ("--config", "--config FILE"),
        ("--prompt-data", "--prompt-data FILE"),
        ("--custom-config-path", "--custom-config-path FILE"),
        ("--custom-rm-path", "--custom-rm-path PACKAGE.NAME"),
        ("--rollout-stop", "--rollout-stop TEXT ..."),
        ("--kl-loss-type", "--kl-loss-type {k1,k2,k3,low_var_kl}"),
        ("--train-env-vars", "--train-env-vars JSON"),
        ("--offload-train", "--offload-train / --no-offload-train"),
        ("--colocate", "--colocate"),
    ],
)
def test_how_a_flag_is_written(flags, option, written):
    assert form(next(flag for flag in flags if flag.option == option)) == written


def test_help_says_what_is_not_available(flags):
    assert "not available yet: position" in help_text(flags, "moe-token-drop-policy")
    assert "status     not available yet: position; --dry-run checks it all the same" in help_text(
        flags, "--moe-token-drop-policy", 100
    )
    assert "status     without effect: set the environment variables" in help_text(flags, "--http-proxy", 100)


def test_help_exits_with_0_and_shows_users_flags(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--help", "depth"])
    with pytest.raises(SystemExit) as caught:
        parse_args(add_custom_arguments=lambda p: p.add_argument("--my-depth", default=3, help="how deep") and None)
    assert caught.value.code == 0
    assert "--my-depth TEXT\n      how deep (default: 3)" in capsys.readouterr().out


def test_help_shows_what_users_flags_take(capsys, monkeypatch):
    def add(parser):
        parser.add_argument("--my-depth", type=int, required=True)
        parser.add_argument("--my-modes", choices=["a", "b"], nargs="+", default=["a"])

    monkeypatch.setattr(sys, "argv", ["train.py", "--help", "my"])
    with pytest.raises(SystemExit):
        parse_args(add_custom_arguments=add)
    assert '--my-depth N\n      (required)\n  --my-modes {a,b} ...\n      (default: ["a"])' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--help", "eval", "temperature"], "--eval-temperature X"),
        (["--num-rollout", "1", "--help", "--lr"], "attribute  args.lr"),
        (["-h", "--colocate", "--lr"], "attribute  args.colocate"),
        (["--help", "--help"], "usage: train.py"),
        (["--help=lr"], "--min-lr X"),
        (["--help=--lr", "--colocate"], "attribute  args.lr"),
    ],
)
def test_what_follows_help_is_looked_up(words, shown, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    with pytest.raises(SystemExit) as caught:
        parse_args()
    assert caught.value.code == 0
    assert shown in capsys.readouterr().out


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


def test_what_a_dry_run_found_is_no_setting():
    """The findings stand at the end of its page, not among the values."""
    args = dry("--cache-mla-latents", "--prompt-data", "nowhere.jsonl", "--http-proxy", "x")
    assert all((args.not_available, args.unchecked, args.warnings))
    assert not {"not_available", "unchecked", "warnings"} & set(dump(args)["derived"])


def test_the_namespace_travels_between_processes():
    args = parse("--eval-prompt-data", "a", "a.jsonl")
    assert vars(pickle.loads(pickle.dumps(args))) == vars(args)


def test_a_group_checks_its_bounds():
    from slime.arguments.groups import Batch

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


def test_a_reference_page_that_drifted_is_found(tmp_path, monkeypatch, capsys):
    from tools import check_docs, gen_arguments_doc

    page = tmp_path / "arguments.md"
    page.write_text(gen_arguments_doc.render().replace("prompts per rollout", "prompts"))
    monkeypatch.setattr(gen_arguments_doc, "PAGE", page)
    monkeypatch.setattr(check_docs, "GENERATED", {page: gen_arguments_doc})
    monkeypatch.setattr(sys, "argv", ["gen_arguments_doc", "--check"])
    assert gen_arguments_doc.main() == 1
    assert "does not match the declarations; run `python -m tools.gen_arguments_doc`" in capsys.readouterr().err
    assert len(check_docs.check_generated()) == 1
    page.write_text(gen_arguments_doc.render())
    assert gen_arguments_doc.main() == 0
    assert check_docs.check_generated() == []


def test_help_of_a_flag_says_what_else_is_true_of_it(flags):
    """The help names its reader, the flags that it needs and the rule that sets it; for hooks the call."""

    def about(option):
        return " ".join(help_text(flags, option, width=120).partition("related:")[0].split())

    assert "needs --update-weight-transport disk" in about("--update-weight-disk-dir")
    assert "read by the driver, the rollout manager or engines; no role has its own" in about("--wandb-mode")
    assert "read by the trainers" in about("--lr")
    assert "set by --eps-clip, unless it is given" in about("--eps-clip-high")
    assert "set by slime.arguments.rules.placement, unless it is given" in about("--rollout-num-gpus")
    assert "set by slime for the critic: False" in about("--use-kl-loss")
    assert "set by slime on a machine without GPUs: 'cpu' unless it is given" in about("--sglang-device")
    assert "called as fn(args, groups)" in about("--rollout-sample-filter-path")
    assert "fills in {rollout_id}, {rank}" in about("--save-debug-train-data")
    assert "generated again after a change" in about("--rollout-top-p")


@pytest.mark.parametrize("more", [(), ("--colocate",), ("--advantage-estimator", "ppo")])
def test_what_a_rule_resolves_has_a_value(flags, more):
    args = parse(*more)
    assert [f.dest for f in flags if f.traits.resolved_by and getattr(args, f.dest) is None] == []
