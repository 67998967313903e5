"""``--eval-config`` and ``--eval-prompt-data``."""

from __future__ import annotations

import dataclasses

import pytest

from slime.arguments import ArgumentError
from slime.arguments.files import eval_config
from slime.arguments.files.eval_config import FIELD_NAMES, EvalDataset, EvalDatasetConfig, build_eval_dataset_configs
from tests.support.arguments import dry


class TestDatasets:
    def test_pairs_on_the_command_line(self):
        args = dry("--eval-prompt-data", "aime", "/d/a.jsonl", "gpqa", "/d/g.jsonl", "--eval-interval", 2)
        assert [(d.name, d.path) for d in args.eval_datasets] == [("aime", "/d/a.jsonl"), ("gpqa", "/d/g.jsonl")]
        assert args.eval_prompt_data == ["aime", "/d/a.jsonl", "gpqa", "/d/g.jsonl"]

    def test_a_single_path_is_aime(self):
        assert dry("--eval-prompt-data", "/d/a.jsonl").eval_datasets[0].name == "aime"

    def test_no_data_sets(self):
        args = dry()
        assert (args.eval_datasets, args.eval_prompt_data) == ([], None)

    @pytest.mark.parametrize("wrapped", [True, False])
    @pytest.mark.parametrize("as_mapping", [True, False])
    def test_entry_then_defaults_then_flags(self, write, wrapped, as_mapping):
        datasets = (
            "datasets:\n  aime: {path: /d/a.jsonl, temperature: 0.1}\n"
            if as_mapping
            else "datasets:\n  - {name: aime, path: /d/a.jsonl, temperature: 0.1}\n"
        )
        text = "defaults: {temperature: 0.9, top_p: 0.7}\n" + datasets
        if wrapped:
            text = "eval:\n" + "".join(f"  {line}\n" for line in text.splitlines())
        words = ["--eval-top-k", 5, "--rollout-max-response-len", 33, "--n-samples-per-eval-prompt", 3]
        (dataset,) = dry("--eval-config", write(text), *words).eval_datasets
        assert (dataset.temperature, dataset.top_p, dataset.top_k) == (0.1, 0.7, 5)
        assert (dataset.max_response_len, dataset.n_samples_per_eval_prompt) == (33, 3)
        assert (dataset.input_key, dataset.metadata_key) == ("input", "metadata")

    def test_the_file_wins_over_the_command_line(self, write):
        path = write("datasets: [{name: b, path: b.jsonl}]")
        args = dry("--eval-prompt-data", "a", "a.jsonl", "--eval-config", path)
        assert args.eval_prompt_data == ["b", "b.jsonl"]

    def test_values_have_the_types_of_their_keys(self, write):
        text = (
            "datasets:\n"
            "- {name: 2024, path: p, temperature: 1, top_p: 1e-1, stop: END, stop_token_ids: 7, top_k: '3'}\n"
            "- {name: b, path: p, stop: [x, y], metadata_overrides: {k: [1]}, reward_model: {any: thing}}\n"
        )
        a, b = dry("--eval-config", write(text)).eval_datasets
        assert (a.name, a.temperature, a.top_p, a.top_k) == ("2024", 1.0, 0.1, 3)
        assert (a.stop, a.stop_token_ids, b.stop) == (["END"], [7], ["x", "y"])
        assert (b.metadata_overrides, b.reward_model) == ({"k": [1]}, {"any": "thing"})


class TestRewards:
    @pytest.mark.parametrize("rm_type", ["deepscaler", "boxed_math"])
    def test_known_types(self, write, rm_type):
        path = write(f"datasets: [{{name: a, path: p, rm_type: {rm_type}}}]")
        assert dry("--eval-config", path).eval_datasets[0].rm_type == rm_type

    def test_an_unknown_type_is_refused(self, write):
        path = write("datasets: [{name: a, path: p, rm_type: deepscalr}]")
        with pytest.raises(
            ArgumentError, match=f"--eval-config {path}: data set a: rm_type deepscalr: expected one of"
        ):
            dry("--eval-config", path)
        with pytest.raises(ArgumentError, match="rm_type remote_rm needs --rm-url"):
            dry("--eval-config", write("datasets: [{name: a, path: p, rm_type: remote_rm}]"))

    def test_a_custom_function_may_have_types_of_its_own(self, write):
        path = write("datasets: [{name: a, path: p, rm_type: mine}]")
        assert dry("--eval-config", path, "--custom-rm-path", "my.reward").eval_datasets[0].rm_type == "mine"
        assert dry("--eval-config", path, "--eval-function-path", "my.eval").eval_datasets[0].rm_type == "mine"


class TestInterpolation:
    def test_json_and_other_keys(self, write):
        text = '{"root": "/d", "eval": {"datasets": [{"name": "a", "path": "${root}/a.jsonl"}]}}'
        assert dry("--eval-config", write(text, "f.json")).eval_datasets[0].path == "/d/a.jsonl"

    def test_without_the_outer_key(self, write):
        text = "root: /d\ndatasets: [{name: a, path: '${root}/a', max_response_len: '${n}'}]\nn: 1_000\n"
        (dataset,) = dry("--eval-config", write(text)).eval_datasets
        assert (dataset.path, dataset.max_response_len) == ("/d/a", 1000)

    def test_the_environment(self, write, monkeypatch):
        monkeypatch.setenv("EVAL_SAMPLES", "16")
        text = "datasets: [{name: a, path: p, n_samples_per_eval_prompt: '${oc.env:EVAL_SAMPLES}'}]"
        assert dry("--eval-config", write(text)).eval_datasets[0].n_samples_per_eval_prompt == 16

    @pytest.mark.parametrize(
        ("reference", "reason"),
        [
            ("${rot}/a", "Interpolation key 'rot' not found"),
            ("${oc.env:NOT_SET_ANYWHERE}", 'KeyError raised while resolving interpolation: "Environment variable'),
        ],
    )
    def test_what_does_not_resolve(self, mistakes, reference, reason):
        (message,) = mistakes(eval_config.read, "--eval-config", f"datasets:\n- name: a\n  path: '{reference}'\n")
        assert message.startswith(f"line 3, datasets[0].path: {reason}")


MISTAKES = [
    ("datasets: []", ["line 1, datasets: no data sets: expected a list of mappings with name and path"]),
    ("defaults: {}", ["line 1, datasets: no data sets: expected a list of mappings with name and path"]),
    ("datasets: [{path: x}]", ["line 1, datasets[0].name: is missing"]),
    ("datasets: [{name: x}]", ["line 1, datasets[0].path: is missing"]),
    ("datasets: {a: }", ["line 1, datasets.a.path: is missing"]),
    ("datasets:\n- aime\n", ["line 2, datasets[0]: expected a mapping (`name: value` lines), got 'aime'"]),
    (
        "datasets:\n  name: aime\n  path: /x\n",
        ["line 1, datasets: expected a list; start every data set with a dash: `- name: ...`"],
    ),
    (
        "defaults: {name: x, tmeperature: 1}\ndatasets: [{name: x, path: y}]",
        ["line 1, defaults.name: unknown key; known are app_service,",
         "line 1, defaults.tmeperature: unknown key; did you mean temperature?"],
    ),
    (
        "datasets:\n- {name: x, path: y}\n- {name: z, path: y}\n- name: x\n  path: z\n",
        ["line 4, datasets[2].name: names must be unique, and x is on line 2 already"],
    ),
    (
        "dataset: []\n",
        ["line 1, dataset: unknown key; did you mean datasets?",
         "line 1, datasets: no data sets: expected a list of mappings with name and path"],
    ),
    ("evals:\n  datasets: []\n", ["line 1, evals: unknown key; did you mean eval?", "line 1, datasets: no data sets"]),
    (
        "eval:\ndatasets:\n- {name: a, path: b}\n",
        ["line 1, eval: expected `defaults` and `datasets`, indented below it, got nothing"],
    ),
    (
        "eval:\n  datasets: [{name: a, path: b}]\ndefaults: {top_p: 1}\n",
        ["line 3, defaults: belongs below `eval:`; indent it by two more spaces"],
    ),
    (
        "eval:\n"
        "  defaults:\n"
        "    max_respnse_len: 3\n"
        "    top_p: 2\n"
        "  datasets:\n"
        "    - name: a\n"
        "      path: [b]\n"
        "      max-response-len: 5\n"
        "    - name: yes\n"
        "      path: c\n"
        "      temperature: hot\n"
        "      n_samples_per_eval_prompt: 1.5\n"
        "      top_k: true\n"
        "      apply_chat_template: maybe\n"
        "      custom_rm_path: no_dot\n"
        "      multimodal_keys: [image]\n"
        "      min_eval_samples: 0\n",
        ["line 3, eval.defaults.max_respnse_len: unknown key; did you mean max_response_len?",
         "line 4, eval.defaults.top_p: expected a value less than or equal to 1, got 2",
         "line 7, eval.datasets[0].path: expected text, got a list",
         "line 8, eval.datasets[0].max-response-len: unknown key; did you mean max_response_len?",
         "line 9, eval.datasets[1].name: expected text, got yes; write it in quotes",
         "line 11, eval.datasets[1].temperature: expected a number, got 'hot'",
         "line 12, eval.datasets[1].n_samples_per_eval_prompt: expected an integer, got 1.5",
         "line 13, eval.datasets[1].top_k: expected a number, got true",
         "line 14, eval.datasets[1].apply_chat_template: expected true or false, got 'maybe'",
         "line 15, eval.datasets[1].custom_rm_path: expected a dotted path like package.module.function, got 'no_dot'",
         "line 16, eval.datasets[1].multimodal_keys: expected a mapping (`name: value` lines), got a list",
         "line 17, eval.datasets[1].min_eval_samples: expected a value greater than or equal to 1, got 0"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), MISTAKES, ids=[repr(text)[:40] for text, _ in MISTAKES])
def test_all_mistakes_at_once(mistakes, text, expected):
    found = mistakes(eval_config.read, "--eval-config", text)
    assert len(found) == len(expected)
    assert [line[: len(start)] for line, start in zip(found, expected, strict=True)] == expected


def test_a_run_reports_them(write):
    path = write("datasets:\n- name: a\n  path: b\n  temperatur: 1\n", "evals.yaml")
    with pytest.raises(ArgumentError) as caught:
        dry("--eval-config", path)
    said = f"--eval-config {path}, line 4, datasets[0].temperatur: unknown key; did you mean temperature?"
    assert str(caught.value) == said


class TestClasses:
    def test_a_file_has_the_keys_of_the_class(self):
        assert set(EvalDataset.model_fields) == set(FIELD_NAMES)

    def test_programmatic_errors_have_the_documented_types(self):
        args = dry()
        with pytest.raises(TypeError, match="unknown keys nope"):
            build_eval_dataset_configs(args, [{"name": "a", "path": "b", "nope": 1}])
        for entries, defaults in (
            ([{"name": "a", "path": "b"}], {"nope": 1}),
            ([], {}),
            ([{"path": "b"}], {}),
            ([{"name": "a", "path": "b", "min_eval_samples": 0}], {}),
        ):
            with pytest.raises(ValueError, match=r"."):
                build_eval_dataset_configs(args, entries, defaults)

    def test_a_mapping_of_names(self):
        (dataset,) = build_eval_dataset_configs(dry(), {"a": {"path": "b"}}, {"top_p": 0.5})
        assert (dataset.name, dataset.path, dataset.top_p) == ("a", "b", 0.5)

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
        assert dataclasses.is_dataclass(Public)
        assert {"message_processor", "no_stop_trim", "custom_generate_function_path"} <= set(FIELD_NAMES)
