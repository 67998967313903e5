"""The YAML files flags name: evaluation data sets, custom values, roles."""

from __future__ import annotations

import pytest

from slime.arguments import ArgumentError
from slime.arguments.files.eval_config import FIELD_NAMES, EvalDatasetConfig, build_eval_dataset_configs
from tests.support.arguments import parse


def write(directory, text, name="file.yaml"):
    path = directory / name
    path.write_text(text)
    return str(path)


class TestEvalDatasets:
    def test_pairs_on_the_command_line(self):
        args = parse("--eval-prompt-data", "aime", "/d/a.jsonl", "gpqa", "/d/g.jsonl", "--eval-interval", 2)
        assert [(d.name, d.path) for d in args.eval_datasets] == [("aime", "/d/a.jsonl"), ("gpqa", "/d/g.jsonl")]
        assert args.eval_prompt_data == ["aime", "/d/a.jsonl", "gpqa", "/d/g.jsonl"]

    def test_a_single_path_is_aime(self):
        assert parse("--eval-prompt-data", "/d/a.jsonl").eval_datasets[0].name == "aime"

    def test_no_data_sets(self):
        args = parse()
        assert (args.eval_datasets, args.eval_prompt_data) == ([], None)

    @pytest.mark.parametrize("wrapped", [True, False])
    @pytest.mark.parametrize("as_mapping", [True, False])
    def test_entry_then_defaults_then_flags(self, tmp_path, wrapped, as_mapping):
        datasets = (
            "datasets:\n  aime: {path: /d/a.jsonl, temperature: 0.1}\n"
            if as_mapping
            else "datasets:\n  - {name: aime, path: /d/a.jsonl, temperature: 0.1}\n"
        )
        text = "defaults: {temperature: 0.9, top_p: 0.7}\n" + datasets
        if wrapped:
            text = "eval:\n" + "".join(f"  {line}\n" for line in text.splitlines())
        words = ["--eval-top-k", 5, "--rollout-max-response-len", 33, "--n-samples-per-eval-prompt", 3]
        (dataset,) = parse("--eval-config", write(tmp_path, text), *words).eval_datasets
        assert (dataset.temperature, dataset.top_p, dataset.top_k) == (0.1, 0.7, 5)
        assert (dataset.max_response_len, dataset.n_samples_per_eval_prompt) == (33, 3)
        assert (dataset.input_key, dataset.metadata_key) == ("input", "metadata")

    def test_the_file_wins_over_the_command_line(self, tmp_path):
        path = write(tmp_path, "datasets: [{name: b, path: b.jsonl}]")
        args = parse("--eval-prompt-data", "a", "a.jsonl", "--eval-config", path)
        assert args.eval_prompt_data == ["b", "b.jsonl"]

    def test_interpolation_and_json(self, tmp_path):
        text = '{"root": "/d", "eval": {"datasets": [{"name": "a", "path": "${root}/a.jsonl"}]}}'
        assert parse("--eval-config", write(tmp_path, text, "f.json")).eval_datasets[0].path == "/d/a.jsonl"

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("datasets: []", "no data sets"),
            ("datasets: [{path: x}]", "has no name"),
            ("datasets: [{name: x}]", "has no path"),
            ("datasets: [{name: x, path: y, temprature: 1}]", "data set x: unknown keys temprature"),
            ("defaults: {name: x}\ndatasets: [{name: x, path: y}]", "unknown keys in defaults: name"),
            ("datasets: [{name: x, path: y}, {name: x, path: z}]", "must be unique: x"),
            ("datasets: [{name: x, path: y, min_eval_samples: 0}]", "min_eval_samples must be positive"),
            ("- a", "expected a mapping"),
            ("dataset: []", "unknown keys dataset"),
            ("a: [", "while parsing"),
        ],
    )
    def test_mistakes_name_the_file(self, tmp_path, text, message):
        path = write(tmp_path, text)
        with pytest.raises(ArgumentError, match=f"--eval-config {path}: [^$]*{message}"):
            parse("--eval-config", path)

    def test_programmatic_errors_have_the_documented_types(self):
        args = parse()
        with pytest.raises(TypeError, match="unknown keys nope"):
            build_eval_dataset_configs(args, [{"name": "a", "path": "b", "nope": 1}])
        with pytest.raises(ValueError, match="unknown keys in defaults"):
            build_eval_dataset_configs(args, [{"name": "a", "path": "b"}], {"nope": 1})

    def test_metadata(self):
        dataset = EvalDatasetConfig("a", "p", rm_type="math", metadata_overrides={"k": 2}, input_key="q")
        original = {"k": 1, "other": [1]}
        assert dataset.inject_metadata(original) == {"k": 2, "other": [1], "rm_type": "math"}
        assert original == {"k": 1, "other": [1]}
        assert EvalDatasetConfig("a", "p").inject_metadata(None) == {}
        assert dataset.cache_key == ("a", "p", "q", None, None, None)

    def test_public_path(self):
        from slime.utils.eval_config import EvalDatasetConfig as Public

        assert Public is EvalDatasetConfig
        assert {"message_processor", "no_stop_trim", "custom_generate_function_path"} <= set(FIELD_NAMES)


class TestCustomConfig:
    def test_known_names_are_typed_and_seen_by_the_checks(self, tmp_path):
        path = write(tmp_path, "eps-clip: 3e-1\nlr: 1e-5\nmax_turns: 4\nnum_experts: null\n")
        args = parse("--custom-config-path", path)
        assert (args.lr, args.max_turns) == (1e-5, 4)
        assert args.eps_clip_high == 0.3

    def test_checks_see_its_values(self, tmp_path):
        path = write(tmp_path, "use_tis: true\nuse_rollout_logprobs: true\n")
        with pytest.raises(ArgumentError, match="--use-rollout-logprobs and --use-tis exclude each other"):
            parse("--custom-config-path", path)

    @pytest.mark.parametrize(
        ("text", "message"),
        [("- a", "expected a YAML mapping"), ("a: [", "cannot be read"), ("seed: x", "seed: expected int, got 'x'")],
    )
    def test_mistakes(self, tmp_path, text, message):
        with pytest.raises(ArgumentError, match=message):
            parse("--custom-config-path", write(tmp_path, text))


class TestRoles:
    def roles(self, tmp_path, text, role):
        from slime.utils.arguments import parse_megatron_role_args

        base = parse("--kl-coef", 0.1)
        return base, parse_megatron_role_args(base, write(tmp_path, text), role)

    def test_overrides_are_typed_and_the_base_is_untouched(self, tmp_path):
        text = "megatron:\n- {name: default, role: actor, overrides: {lr: '1e-5', num-nodes: 9, my_own: x}}"
        base, actor = self.roles(tmp_path, text, "actor")
        assert (base.lr, actor.lr, actor.my_own) == (1e-6, 1e-5, "x")
        assert not hasattr(actor, "num_nodes")
        assert actor.kl_coef == 0.1

    def test_the_critic(self, tmp_path):
        base, critic = self.roles(tmp_path, "megatron:\n- {role: critic, args: {lr: 1.0e-5}}", "critic")
        assert (critic.lr, critic.kl_coef, critic.untie_embeddings_and_output_weights) == (1e-5, 0, True)
        assert critic.disable_param_buffers_cpu_backup is False
        assert base.kl_coef == 0.1

    def test_a_role_without_entry_inherits(self, tmp_path):
        base, actor = self.roles(tmp_path, "megatron: []", "actor")
        assert vars(actor) == vars(base)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("megatron: {a: 1}", "expected a list of roles"),
            ("megatron: [{role: actor}, {role: actor}]", "role actor appears 2 times"),
            ("megatron: [{role: actor, override: {}}]", "unknown keys override"),
            ("megatron: [{role: actor, overrides: {lr: fast}}]", "lr: expected float, got 'fast'"),
        ],
    )
    def test_mistakes(self, tmp_path, text, message):
        with pytest.raises(ArgumentError, match=message):
            self.roles(tmp_path, text, "actor")
