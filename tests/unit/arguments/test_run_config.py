"""``--dump-config`` and ``--config``: what is written, what wins, and what is said of wrong files."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import yaml

import slime
from slime.arguments import ArgumentError, parse_args
from slime.arguments.command_line import all_flags, build_parser
from slime.arguments.files import run_config
from slime.arguments.parse import resolve
from tests.support.arguments import dry, known, minimal_flags, parse


def from_file(path, *words):
    return resolve(["--dry-run", "--config", str(path), *map(str, words)], *known())


@pytest.fixture
def dumped(tmp_path):
    """``dumped(*words)`` is the path of the file that a run with these flags writes."""

    def dump(*words):
        dry(*words, "--dump-config", tmp_path / "run.yaml")
        return tmp_path / "run.yaml"

    return dump


@pytest.fixture
def hand_written(tmp_path):
    """``hand_written(text)`` is the path of a file with the flags every run needs and ``text``."""

    def write(text, *, indent=""):
        words = minimal_flags()
        lines = []
        while words:
            name = words.pop(0)
            value = "true" if not words or words[0].startswith("--") else words.pop(0)
            lines.append(f"{indent}{name[2:]}: {value}")
        path = tmp_path / "hand.yaml"
        path.write_text("\n".join([*lines, text]) + "\n")
        return path

    return write


class TestWriting:
    def test_sections(self, dumped):
        path = dumped("--lr", "1e-5", "--disable-rewards-normalization", "--sglang-max-total-tokens", "20k")
        file = yaml.safe_load(path.read_text())
        assert list(file) == ["versions", "arguments", "defaults", "derived"]
        assert file["versions"]["slime"] == slime.__version__
        assert file["versions"]["packages"]["pydantic"]
        assert file["arguments"]["lr"] == 1e-5
        assert file["arguments"]["rewards_normalization"] is False
        assert file["arguments"]["sglang_max_total_tokens"] == 20_000
        assert (file["defaults"]["rollout_seed"], file["defaults"]["kl_coef"]) == (42, 0.0)
        assert "lr" not in file["defaults"]
        assert file["derived"]["over_sampling_batch_size"] == file["arguments"]["rollout_batch_size"]
        assert file["derived"]["data_parallel_size"] == 1

    def test_every_flag_of_slime_is_in_it(self, dumped):
        file = yaml.safe_load(dumped().read_text())
        own = {flag.dest for flag in all_flags() if flag.source == "slime"}
        left_out = own - set(file["arguments"]) - set(file["defaults"])
        assert left_out == run_config.OWN_FLAGS

    def test_what_was_given_is_written_not_what_rules_made_of_it(self, dumped):
        file = yaml.safe_load(dumped("--load", "/checkpoints/run").read_text())
        assert file["arguments"]["load"] == "/checkpoints/run"
        assert file["derived"]["load"] == file["arguments"]["hf_checkpoint"]

    def test_secrets_are_left_out_and_named(self, dumped):
        path = dumped(
            "--wandb-key", "s3cret", "--sglang-api-key", "hush", "--train-env-vars", '{"MY_API_KEY": "pst", "A": "b"}'
        )
        text = path.read_text()
        assert not any(word in text for word in ("s3cret", "hush", "pst"))
        asked = next(line for line in text.splitlines() if "Secrets" in line)
        assert asked.startswith("# Secrets are not written; give them again: ")
        assert all(name in asked for name in ("wandb_key", "sglang_api_key", "MY_API_KEY in train_env_vars"))
        assert from_file(path).train_env_vars == {"A": "b"}
        assert from_file(path, "--wandb-key", "again").wandb_key == "again"

    def test_secrets_within_values_are_left_out_and_named(self, dumped):
        env = {"DATABASE": "postgres://u:hush@h/db", "OPENAI_KEY": "pst", "DEBUG": "1", "HEADER": "Bearer abcdefghijkl"}
        path = dumped("--rm-url", "https://u:s3cret@h", "--train-env-vars", json.dumps(env))
        text = path.read_text()
        assert not [word for word in ("s3cret", "hush", "pst", "abcdefghijkl") if word in text]
        asked = next(line for line in text.splitlines() if "Secrets" in line)
        names = ("rm_url", "DATABASE in train_env_vars", "OPENAI_KEY in train_env_vars", "HEADER in train_env_vars")
        assert all(name in asked for name in names)
        assert from_file(path).train_env_vars == {"DEBUG": "1"}
        assert from_file(path, "--rm-url", "https://u:again@h").rm_url == "https://u:again@h"

    def test_an_old_file_is_replaced_whole(self, dumped, tmp_path):
        (tmp_path / "run.yaml").write_text("old")
        first = dumped("--lr", "1e-3").read_text()
        assert dumped("--lr", "1e-4").read_text() != first
        assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
        mask = os.umask(0)
        os.umask(mask)
        assert stat.S_IMODE((tmp_path / "run.yaml").stat().st_mode) == 0o666 & ~mask

    def test_where_it_cannot_be_written(self, tmp_path):
        (tmp_path / "file").write_text("")
        for path, reason in ((tmp_path / "file" / "run.yaml", "cannot be written"), (tmp_path, "cannot be written")):
            with pytest.raises(ArgumentError, match=f"--dump-config {path}: {reason}: "):
                dry("--dump-config", path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]

    def test_directories_are_made(self, tmp_path):
        dry("--dump-config", tmp_path / "a" / "b" / "run.yaml")
        assert (tmp_path / "a" / "b" / "run.yaml").is_file()

    def test_a_refused_command_line_writes_nothing(self, tmp_path):
        with pytest.raises(ArgumentError):
            dry("--rollout-temperature", 0, "--dump-config", tmp_path / "run.yaml")
        assert list(tmp_path.iterdir()) == []


class TestReading:
    def test_the_command_line_wins(self, dumped):
        path = dumped("--lr", "1e-5", "--rollout-stop", "a", "b", "--offload-train", "--colocate")
        args = from_file(path, "--lr", "1e-3", "--rollout-stop", "c", "--no-offload-train")
        assert (args.lr, args.rollout_stop, args.offload_train, args.colocate) == (1e-3, ["c"], False, True)
        assert args.global_batch_size == 4

    def test_given_means_given_and_defaults_do_not(self, dumped, tmp_path):
        path = dumped("--lr", "1e-5")
        file = yaml.safe_load(path.read_text())
        file["defaults"] |= {"rollout_seed": 7, "min_lr": 0.0, "eps_clip": 0.3}
        path.write_text(yaml.safe_dump(file))
        args = from_file(path)
        assert {"lr", "config"} <= args.explicit_flags
        assert not {"rollout_seed", "eps_clip"} & args.explicit_flags
        assert (args.rollout_seed, args.eps_clip, args.eps_clip_high) == (7, 0.3, 0.3)

    def test_other_defaults_are_written_again(self, dumped, tmp_path):
        path = dumped()
        path.write_text(path.read_text().replace("rollout_seed: 42", "rollout_seed: 7"))
        from_file(path, "--dump-config", tmp_path / "second.yaml")
        assert yaml.safe_load((tmp_path / "second.yaml").read_text())["defaults"]["rollout_seed"] == 7

    def test_a_flat_mapping_by_hand(self, hand_written):
        text = (
            "# mine\nlr: 1e-5\ndisable_rewards_normalization: true\nno-offload-rollout: true\n--use-tis: true\n"
            "rollout-stop: END\nwandb_group: 007\neval_prompt_data: [aime, a.jsonl]\nkl-loss-type: low_var_kl\n"
        )
        args = from_file(hand_written(text))
        assert (args.lr, args.rewards_normalization, args.offload_rollout, args.use_tis) == (1e-5, False, False, True)
        assert (args.rollout_stop, args.wandb_group, args.eval_datasets[0].path) == (["END"], "007", "a.jsonl")

    def test_only_arguments_by_hand(self, hand_written):
        path = hand_written("  lr: 2e-5", indent="  ")
        path.write_text("arguments:\n" + path.read_text())
        args = from_file(path)
        assert (args.lr, args.rollout_batch_size) == (2e-5, 4)

    def test_flags_of_ones_own_code(self, tmp_path):
        def add(parser):
            parser.add_argument("--my-depth", type=int, default=3)
            parser.add_argument("--my-mode", choices=["a", "b"])

        flags = all_flags()
        parser = build_parser(flags, add)
        words = [*minimal_flags(), "--my-depth", "5", "--dry-run", "--dump-config", str(tmp_path / "run.yaml")]
        resolve(words, flags, parser)
        args = resolve(["--dry-run", "--config", str(tmp_path / "run.yaml")], flags, build_parser(flags, add))
        assert (args.my_depth, args.my_mode) == (5, None)
        assert "my_depth" in args.explicit_flags

    def test_numbers_and_choices_of_ones_own_code_are_checked(self, tmp_path):
        def add(parser):
            parser.add_argument("--my-rate", type=float)
            parser.add_argument("--my-depth", type=int)
            parser.add_argument("--my-mode", choices=["a", "b"])

        def own(text):
            (tmp_path / "run.yaml").write_text(text)
            return parse("--config", tmp_path / "run.yaml", add_custom_arguments=add)

        args = own("my_rate: 3\nmy-depth: 4\nmy_mode: b\n")
        assert (args.my_rate, type(args.my_rate), args.my_depth, args.my_mode) == (3.0, float, 4, "b")
        with pytest.raises(ArgumentError) as caught:
            own("my_rate: fast\nmy_depth: 4.5\nmy_mode: c\n")
        assert [line.split(", ", 1)[1] for line in str(caught.value).splitlines()] == [
            "line 1, my_rate: expected a number, got 'fast'",
            "line 2, my_depth: expected an integer, got 4.5",
            "line 3, my_mode: expected one of a, b, got 'c'",
        ]

    def test_attributes_of_plugins_stay_in_their_file(self, dumped, tmp_path):
        (tmp_path / "custom.yaml").write_text("max_turns: 4\nlr: 3e-5\n")
        path = dumped("--custom-config-path", tmp_path / "custom.yaml")
        assert "max_turns" not in yaml.safe_load(path.read_text())["arguments"]
        args = from_file(path)
        assert (args.max_turns, args.lr) == (4, 3e-5)

    def test_a_real_run_reads_it_too(self, dumped):
        args = parse_args(["--config", str(dumped("--lr", "1e-5"))])
        assert (args.lr, args.dry_run) == (1e-5, None)


class TestDifferences:
    def differences(self, args):
        return [warning for warning in args.warnings if warning.startswith("--config")]

    def test_nothing_changed(self, dumped):
        assert self.differences(from_file(dumped("--load", "/nowhere/run", "--kl-coef", "0.1"))) == []

    def test_a_checkpoint_appeared(self, dumped, tmp_path):
        load = tmp_path / "checkpoint"
        path = dumped("--load", load)
        was = yaml.safe_load(path.read_text())["arguments"]["hf_checkpoint"]
        load.mkdir()
        (load / "latest_checkpointed_iteration.txt").write_text("5")
        said = self.differences(from_file(path))
        assert f"--config {path}: load was {was!r} when the file was written, and is {str(load)!r} now" in said
        assert f"--config {path}: no_load_optim was True when the file was written, and is False now" in said

    def test_a_flag_that_is_overridden_explains_them(self, dumped):
        assert self.differences(from_file(dumped(), "--rollout-batch-size", 8)) == []

    def test_a_file_made_by_hand_says_nothing_of_them(self, hand_written):
        assert self.differences(from_file(hand_written("lr: 1e-5"))) == []


MISTAKES = [
    ("", ["the file is empty; expected `name: value` lines"]),
    (
        "lerning-rate: 1\nlr: fast\n",
        ["line 1, lerning-rate: no flag has this name", "line 2, lr: expected a number, got 'fast'"],
    ),
    ("rollout_batchsize: 3\n", ["line 1, rollout_batchsize: no flag has this name; did you mean rollout_batch_size?"]),
    (
        "arguments:\n  use_tis: maybe\n  lr: 1\ndefault:\n  seed: 3\nrollout_seed: 3\n",
        ["line 2, arguments.use_tis: expected true or false, got 'maybe'",
         "line 4, default: unknown key; did you mean defaults?",
         "line 6, rollout_seed: flags belong below `arguments:`"],
    ),
    ("arguments:\n- lr\n", ["line 1, arguments: expected a mapping (`name: value` lines), got a list"]),
    (
        "defaults:\n  rollout_sed: 3\n",
        ["line 2, defaults.rollout_sed: no flag has this name; did you mean rollout_seed?"],
    ),
    ("config: other.yaml\n", ["line 1, config: a configuration file cannot name another one; copy its lines"]),
    (
        "arguments: {dry-run: true, dump_config: x}\n",
        ["line 1, arguments.dry-run: belongs on the command line, not in the file",
         "line 1, arguments.dump_config: belongs on the command line, not in the file"],
    ),
    ("sglang_port: 2\n", ["line 1, sglang_port: it is set by slime itself: slime picks a free one"]),
    ("kl_loss_type: k9\n", ["line 1, kl_loss_type: expected one of k1, k2, k3, low_var_kl, got 'k9'"]),
    ("lr: 1\nLR: 2\n", ["line 2, LR: no flag has this name; did you mean lr?"]),
    ("n_samples_per_prompt: 0\n", ["line 1, n_samples_per_prompt: expected a value greater than or equal to 1, got 0"]),
    ("lr:\n  value: 3\n", ["line 1, lr: expected a number, got a mapping"]),
    ("lr=1e-5\n", ["line 1: expected `name: value` lines, got the text 'lr=1e-5'"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), MISTAKES, ids=[repr(text)[:40] for text, _ in MISTAKES])
def test_all_mistakes_at_once(tmp_path, text, expected):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ArgumentError) as caught:
        run_config.read(str(path), all_flags())
    found = [line.removeprefix(f"--config {path}").lstrip(":, ") for line in str(caught.value).splitlines()]
    assert found == expected


def test_the_run_directory_and_the_view_show_the_same(tmp_path):
    """Both are made of the same plain data, secrets masked."""
    from slime.arguments import dump
    from slime.observability import run_dir

    args = dry("--wandb-key", "s3cret", "--eval-prompt-data", "a", "a.jsonl", "--run-dir", tmp_path / "run")
    view = dump(args)
    file = yaml.safe_load((Path(run_dir.prepare(args)) / "config.yaml").read_text())
    assert file["wandb_key"] == "***"
    assert file["eval_datasets"][0]["path"] == "a.jsonl"
    for section in view.values():
        assert {name: file[name] for name in section if name != "run_dir"} == {
            name: value for name, value in section.items() if name != "run_dir"
        }
