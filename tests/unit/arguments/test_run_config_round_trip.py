"""A run that is written by ``--dump-config`` and read by ``--config`` is the same run, whatever its flags."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from slime.arguments import ArgumentError
from slime.arguments.files.run_config import OWN_FLAGS
from slime.arguments.flag import Flag
from slime.arguments.parse import resolve
from slime.utils.secrets import is_secret
from tests.support.arguments import known, minimal_flags
from tests.support.command_lines import command_lines

pytestmark = pytest.mark.slow

# Files that must be there; what they hold is the subject of other tests.
FILES = {
    "custom_config_path": "entropy_coef: 1e-3\nmy_own: {a: [1, x]}\n",
    "eval_config": "datasets: [{name: a, path: a.jsonl, temperature: 1e-1}]\n",
    "megatron_config_path": "megatron: [{role: critic, overrides: {lr: 1e-5}}]\n",
    "sglang_config": "sglang: [{name: a, server_groups: [{num_gpus: 1}]}]\n",
}
# What some flags need beside them, or as their value, to be accepted.
NEEDS = {
    "release_train": "--save out --update-weight-transport disk --update-weight-disk-dir d",
    "mask_offpolicy_in_partial_rollout": "--partial-rollout",
    "sglang_router_ip": "--sglang-router-port 8000",
    "prefill_num_servers": "--rollout-num-gpus 9",
    "balance_by_flops": "--use-dynamic-batch-size --max-tokens-per-gpu 100",
    "use_dynamic_batch_size": "--max-tokens-per-gpu 100",
    "eval_interval": "--eval-prompt-data a a.jsonl b b.jsonl",
    "rm_url": "--rm-type remote_rm",
    "custom_loss_function_path": "--loss-type custom_loss",
    "use_stateless_adam": "--no-save-optim",
    "get_mismatch_metrics": "--custom-tis-function-path my.tis",
    "save_interval": "--save out",
    "save_hf": "--save out --save-interval 1",
    "use_tensorboard": "--tb-project-name p",
    "load_debug_rollout_data_subsample": "--load-debug-rollout-data d/{rollout_id}.pt",
    "load_forge_rollout_data": "--rollout-function-path slime.rollout.forge_load.generate_rollout",
    "opd_type": "--use-opd --opd-teacher-load teacher",
    "opd_teacher_load": "--use-opd --opd-type megatron",
    "mtp_num_layers": "--hf-checkpoint /nowhere/model",
    "enable_mtp_training": "--mtp-num-layers 1 --hf-checkpoint /nowhere/model",
    "decoder_first_pipeline_num_layers": "--actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2",
    "recompute_method": "--recompute-granularity full --recompute-num-layers 1",
}
CHOSEN = {"rm_type": ("math", "boxed_gpqa"), "ci_save_grad_norm": ("g/{role}/{rollout_id}/{step_id}.pt",)}
# Texts that YAML would take for something else, and texts that flags ask for.
TEXTS = (
    "x", "my.plugin.function", "/d/{rollout_id}.pt", "/d/p.jsonl", "1e-5", "007", "0x10", "1_000", "12:30", "1.5", "no",
    "True", "null", "None", "~", "", " ", "a: b", "- a", "#x", "a #b", "[a", "{}", "'", '"', "%x", "@x", "&x", "*x",
    "!x", "|", "a\nb", "\tx", "2024-01-02", ".inf", "${x}", "größe", "\U0001f600", "\x85\u2028", "\\n", "http://h:1/p?q=1",
)  # fmt: skip
NUMBERS = {
    "int": ("0", "1", "2", "4", "8", "1024", "-1", "1_000"),
    "float": ("0", "1", "0.5", "1e-5", "2.5e10", "-0.25", "inf", "nan", "0.1", "1e22"),
    "human_int": ("4096", "20k", "128Ki"),
    "layout": ("1", "[0,1]", "([0]*2+[1])", "128,0"),
    "json": ("{}", '{"a": "b"}', '{"a": "1e-5", "b": "no"}', '{"a": [1, null, true, 1.5], "b": {"c": ""}}', "[1, 2]",
             '"no"'),
}  # fmt: skip

ANY_TEXT = st.sampled_from(TEXTS) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8
).filter(lambda text: text != "--")  # argparse makes an empty list of --flag=--


@cache
def candidates() -> dict[str, list[Flag]]:
    """The flags of every source that a random command line may have."""
    found: dict[str, list[Flag]] = {}
    for flag in known()[0]:
        if flag.dest not in OWN_FLAGS and flag.dest not in FILES:
            found.setdefault(flag.source, []).append(flag)
    return found


@cache
def flags_of(source: str) -> st.SearchStrategy[Flag]:
    """One of the flags of ``source``."""
    flags = candidates()[source]
    return st.integers(0, len(flags) - 1).map(flags.__getitem__)


@st.composite
def words_of(draw: st.DrawFn, flag: Flag) -> list[str]:
    """``flag`` with a value of its kind, right or (where rules want something else) wrong, after what it needs."""
    return [*shlex.split(NEEDS.get(flag.dest, "")), *draw(own_words_of(flag))]


@st.composite
def own_words_of(draw: st.DrawFn, flag: Flag) -> list[str]:
    """``flag`` with a value."""
    option = draw(st.sampled_from(flag.options))
    if flag.action in ("true", "false", "tristate"):
        return [option]
    if flag.dest in CHOSEN:
        value = st.sampled_from(CHOSEN[flag.dest])
    elif flag.choices:
        value = st.sampled_from([str(choice) for choice in flag.choices])
    elif flag.kind in NUMBERS:
        value = st.sampled_from(NUMBERS[flag.kind])
    else:
        value = ANY_TEXT
    if flag.action == "append":
        return [f"{option}={word}" for word in draw(st.lists(value, min_size=1, max_size=3))]
    if flag.nargs in ("+", "*"):
        plain = value.filter(lambda word: not word.startswith("-"))
        return [option, *draw(st.lists(plain, min_size=flag.nargs == "+", max_size=3))]
    if flag.nargs == "?" and draw(st.booleans()):
        return [option]
    return [f"{option}={draw(value)}"]


@st.composite
def random_lines(draw: st.DrawFn) -> list[str]:
    """A command line that is accepted, or one of random sizes, and up to eight flags of any source after it."""
    words = minimal_flags() if draw(st.integers(0, 3)) else shlex.split(draw(command_lines()))
    for _ in range(draw(st.integers(0, 8))):
        source = draw(st.sampled_from(["slime", "megatron", "sglang", "router"]))
        words += draw(words_of(draw(flags_of(source))))
    for name in draw(st.lists(st.sampled_from(sorted(FILES)), max_size=2, unique=True)):
        if draw(st.integers(0, 4)) == 0:
            words += ["--" + name.replace("_", "-"), name + ".yaml"]
    return words


def parsed(words: list[str]) -> Namespace | None:
    """Return the arguments that a dry run resolves from ``words``, None when it refuses them."""
    try:
        return resolve([*words, "--dry-run"], *known())
    except ArgumentError:
        return None


def comparable(args: Namespace) -> dict[str, str]:
    """Every attribute as text that also tells 1 from 1.0 and True; the flags of files are left out.

    A file has each flag once: what is said about flags that a line repeats is left out too.
    """
    values = {name: value for name, value in vars(args).items() if name not in OWN_FLAGS}
    values["warnings"] = [text for text in args.warnings if "times; the last one holds" not in text]
    values["explicit_flags"] = sorted(args.explicit_flags - OWN_FLAGS)
    return {name: repr(value) for name, value in values.items()}


def secrets_of(words: list[str]) -> list[str]:
    """The flags of ``words``, with their values, that are not written because they hold a secret."""
    flags: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            flags.append([])
        flags[-1].append(word)
    return [word for flag in flags if is_secret(" ".join(flag)) for word in flag]


def round_trip(words: list[str], path: Path) -> Namespace | None:
    """Write the run of ``words`` and read it back, secrets given again; None when the line is refused."""
    first = parsed([*words, "--dump-config", str(path)])
    if first is None:
        return None
    second = resolve(["--config", str(path), "--dry-run", *secrets_of(words)], *known())
    assert comparable(second) == comparable(first)
    return second


RELAXED = [
    HealthCheck.filter_too_much,
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.function_scoped_fixture,
]


def run(directory: Path, cases: int, capsys: Any) -> Counter[str]:
    for name, text in FILES.items():
        (directory / f"{name}.yaml").write_text(text)
    seen: Counter[str] = Counter()

    @settings(max_examples=cases, deadline=None, database=None, suppress_health_check=RELAXED)
    @given(random_lines())
    def property_(words: list[str]) -> None:
        seen["tried"] += 1
        args = round_trip(words, directory / "run.yaml")
        assume(args is not None)
        seen["accepted"] += 1
        seen.update(f"flag {name}" for name in args.explicit_flags)

    property_()
    covered = [name for name in seen if name.startswith("flag ")]
    with capsys.disabled():
        print(f"\n{seen['accepted']} of {seen['tried']} command lines accepted, with {len(covered)} different flags")
    assert seen["accepted"] > 0.25 * seen["tried"]
    return seen


def test_the_round_trip(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(tmp_path, 80, capsys)["accepted"] >= 80


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_ten_thousand_round_trips(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    seen = run(tmp_path, 10_000, capsys)
    assert seen["accepted"] >= 10_000
    for source, flags in candidates().items():
        covered = sum(f"flag {flag.dest}" in seen for flag in flags)
        assert covered > 0.9 * len(flags), f"{source}: {covered} of {len(flags)} flags"


def test_every_kind_of_flag(tmp_path):
    """Every kind of flag, and every value of the lists above, with a flag that accepts it beside the others."""
    kinds: dict[Any, list[Flag]] = {}
    for flag in [flag for flags in candidates().values() for flag in flags]:
        kind = (flag.action, flag.kind, flag.nargs, flag.collapse, flag.choices is not None)
        kinds.setdefault(kind, []).append(flag)
    for flags in kinds.values():
        words = minimal_flags()
        for value in _values(flags[0]):
            for flag in flags[:3] + flags[-3:]:
                longer = [*words, *_words(flag, value)]
                if parsed(longer) is not None:
                    words = longer
                    flags.remove(flag)
                    break
        assert len(words) > len(minimal_flags())
        round_trip(words, tmp_path / "run.yaml")


def _values(flag: Flag) -> Sequence[Any]:
    if flag.action in ("true", "false", "tristate"):
        return (None,)
    return flag.choices or NUMBERS.get(flag.kind, TEXTS)


def _words(flag: Flag, value: Any) -> list[str]:
    option = flag.options[-1]
    if value is None:
        return [option]
    return [option, str(value)] if flag.nargs in ("+", "*") else [f"{option}={value}"]


@pytest.mark.parametrize(
    "words",
    [
        ["--wandb-key=x", "--wandb-group=y"],
        ["--sglang-api-key", "k", "--lr", "1e-5"],
        ["--train-env-vars", '{"WANDB_API_KEY": "s", "A": "b"}'],
    ],
)
def test_secrets_are_given_again(words, tmp_path):
    assert round_trip([*minimal_flags(), *words], tmp_path / "run.yaml") is not None
    assert secrets_of(words) == (words[:1] if "=" in words[0] else words[:2])


def test_json_values_keep_their_types(tmp_path):
    value = {"1": 1, "t": "true", "f": 1e-7, "n": None, "l": ["1e-5", 1.0, []], "e": {}}
    words = [*minimal_flags(), "--apply-chat-template-kwargs", json.dumps(value)]
    args = round_trip(words, tmp_path / "run.yaml")
    assert json.dumps(args.apply_chat_template_kwargs) == json.dumps(value)
