"""Launch scripts in the form of slime <= 0.3.1, over every flag that its releases knew: all are accepted."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from slime.arguments.command_line import read_words
from slime.arguments.older_flags import older_flags, translate
from slime.arguments.parse import resolve
from slime.arguments.passthrough import catalog, sglang
from tests.support import launch_corpus
from tests.support.arguments import known
from tests.support.imports import ROOT

DATA = ROOT / "tests" / "data" / "arguments"
# Script -> the flags whose features this version refuses; a dry run says so and continues.
REFUSED = {
    "run-glm5-744B-A40B.sh": {
        "--megatron-deepgemm-forward-layers", "--megatron-deepgemm-forward-modules",
        "--megatron-deepgemm-moe-forward-layers", "--megatron-deepgemm-moe-forward-modules",
    },
    "run-qwen3-4B-0.2-refused.sh": {
        "--over-sampling-filter-path", "--use-dynamic-global-batch-size", "--true-on-policy-mode",
        "--slime-router-middleware-paths", "--critic-train-only",
    },
}  # fmt: skip
SCRIPTS = [*launch_corpus.names(".sh"), *launch_corpus.names(".py")]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """The flags that a script of the corpus gives, by its name."""

    @cache
    def of(name: str) -> list[str]:
        folder = tmp_path_factory.mktemp("corpus")
        return (launch_corpus.words_of_bash if name.endswith(".sh") else launch_corpus.words_of_python)(name, folder)

    return of


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_accepted_and_says_which_features_are_refused(name, words):
    args = resolve([*words(name), "--dry-run"], *known(), log_probs=name == "run-megatron-server.sh")
    assert {message.split()[0] for message in args.not_available} == REFUSED.get(name, set())
    given = [word.split("=")[0] for word in words(name)]
    older = {word for word in given if word in older_flags()} - REFUSED.get(name, set())
    assert older <= {warning.split()[0] for warning in args.warnings}


def test_a_script_gets_what_it_asks_for(words):
    """Values that go through older names, a shell's own words and a file."""
    args = resolve([*words("run-qwen3-4B.sh"), "--dry-run"], *known())
    assert args.sglang_cuda_graph_bs_decode == [1, 2, 4, 8, *range(16, 257, 8)]
    assert (args.world_size, args.rollout_num_engines, args.num_layers) == (8, 4, 36)
    assert args.update_weight_buffer_size == 512 * 1024 * 1024
    args = resolve([*words("run-glm4-9B-async.sh"), "--dry-run"], *known())
    assert args.rollout_stop == ["</answer>", "<|user|>"]
    assert args.rollout_sample_hook_path == ["my_project.hooks.one", "my_project.hooks.two"]
    assert resolve(words("run_qwen3_4B_sft.py"), *known()).sglang_cuda_graph_max_bs_decode == 32


def test_the_corpus_covers_every_flag_of_the_releases(words):
    lines = (DATA / "flags_of_releases.txt").read_text().splitlines()
    wanted = {line for line in lines if not line.startswith("#")}
    given = {word.split("=")[0] for name in SCRIPTS for word in words(name)}
    assert len(wanted) > 300
    assert wanted - given == set()
    assert {option for option in older_flags() if not option.startswith("--sglang-")} <= wanted


def _sglang_rows() -> list[list[str]]:
    lines = (DATA / "sglang_releases.tsv").read_text().splitlines()
    return [line.split("\t") for line in lines if not line.startswith("#")]


def _number(release: str) -> list[int]:
    return [int(part.removeprefix("post")) for part in release.split(".")]


RELEASES = sorted({release for row in _sglang_rows() for release in row[1:3]}, key=_number)


@pytest.mark.parametrize("release", RELEASES)
def test_every_flag_of_a_release_of_sglang_is_accepted(release):
    """One line with all that its server took; what slime sets itself is left out."""
    line: list[str] = []
    for option, first, last, value in _sglang_rows():
        if _number(first) <= _number(release) <= _number(last):
            line += ["--sglang-" + option[2:], *([value] if value else [])]
    _, parser = known()
    done = translate(line, parser)
    values, rest = read_words(parser, done.words)
    assert len(line) > 180
    assert rest == []
    options = [word for word in line if word.startswith("--")]
    now = {option: option if option in parser._option_string_actions else _now(option) for option in options}
    assert {parser._option_string_actions[option].dest for option in now.values() if option} == values.keys()
    assert {sentence.split()[0] for sentence in done.refused} <= {option for option in options if now[option] is None}


def _now(option: str) -> str | None:
    return older_flags()[option][0].target


def test_the_comparison_reaches_the_tested_release():
    assert catalog.SGLANG.pinned == "0.5.20"
    assert RELEASES[-1] == "0.5.19"
    assert not {row[0] for row in _sglang_rows()} & {o.replace("--sglang-", "--") for o in sglang.owned_options()}


def test_the_stand_ins_keep_programs_from_being_ended():
    """A script of the corpus ends processes by name: none of the real programs may be found."""
    assert not {"pkill", "ray", "kill", "killall"} & set(launch_corpus.HARMLESS)
    assert all(Path(launch_corpus.FOLDER / name).is_file() for name in REFUSED)
