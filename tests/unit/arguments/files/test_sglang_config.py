"""``--sglang-config``: models, groups of engines and their settings."""

from __future__ import annotations

from argparse import Namespace

import pytest

from slime.arguments import ArgumentError
from slime.arguments.files import sglang_config
from slime.backends.sglang_utils.sglang_config import ModelConfig, ServerGroupConfig, SglangConfig

TWO_MODELS = """
sglang:
  - name: actor
    num_gpus_per_engine: 2
    server_groups:
      - {worker_type: prefill, num_gpus: 2}
      - worker_type: decode
        num_gpus: 8
        num_gpus_per_engine: 4
        overrides: {mem-fraction-static: 8e-1, disable_cuda_graph: yes, load_balance_method: round_robin}
      - {worker_type: placeholder, num_gpus: 3}
  - name: judge
    model_path: /models/judge
    engine_groups:
      - {worker_type: regular, num_gpus: 3}
"""


def arguments(**values):
    return Namespace(
        **{
            "hf_checkpoint": "/models/actor", "rollout_num_gpus": 16, "rollout_num_gpus_per_engine": 1,
            "sglang_config": None, "prefill_num_servers": None, "rollout_external_engine_addrs": None,
            "debug_train_only": False, "debug_rollout_only": False, "warnings": [], **values,
        }
    )  # fmt: skip


class TestDeployment:
    def test_a_file(self, write):
        args = arguments(sglang_config=write(TWO_MODELS))
        config = sglang_config.deployment(args)
        actor, judge = config.models
        assert [(g.worker_type, g.num_gpus_per_engine, g.num_engines) for g in actor.server_groups] == [
            ("prefill", 2, 1), ("decode", 4, 2), ("placeholder", 2, 0),
        ]  # fmt: skip
        assert actor.server_groups[1].overrides == {
            "mem_fraction_static": 0.8, "disable_cuda_graph": True, "load_balance_method": "round_robin",
            "model_path": "/models/actor",
        }  # fmt: skip
        assert (actor.model_path, actor.update_weights, actor.total_num_gpus) == ("/models/actor", True, 13)
        assert (judge.model_path, judge.update_weights) == ("/models/judge", False)
        assert [g.num_engines for g in judge.server_groups] == [3]
        assert (config.total_num_gpus, config.num_engines) == (16, 6)
        assert config.has_pd_disaggregation
        assert (actor.has_pd_disaggregation, judge.has_pd_disaggregation) == (True, False)
        (warning,) = args.warnings
        assert warning.startswith("model judge is /models/judge, not --hf-checkpoint /models/actor: its weights stay")

    def test_without_one_all_slots_serve_the_model(self):
        (model,) = sglang_config.deployment(arguments(rollout_num_gpus=8, rollout_num_gpus_per_engine=4)).models
        (group,) = model.server_groups
        assert (model.name, model.update_weights, model.model_path) == ("default", True, "/models/actor")
        assert (group.worker_type, group.num_gpus, group.num_gpus_per_engine, group.num_engines) == ("regular", 8, 4, 2)

    @pytest.mark.parametrize(
        "values",
        [
            {"rollout_num_gpus": 0},
            {"rollout_num_gpus": None},
            {"debug_train_only": True},
            {"debug_train_only": True, "prefill_num_servers": 2},
            {"rollout_external_engine_addrs": ["a:1"]},
        ],
    )
    def test_no_engine(self, values):
        (model,) = sglang_config.deployment(arguments(**values)).models
        assert (model.name, model.server_groups) == ("default", [])

    def test_training_alone_still_reads_the_file(self, write, mistakes):
        assert (
            sglang_config.deployment(arguments(debug_train_only=True, sglang_config=write(TWO_MODELS))).num_engines == 0
        )
        with pytest.raises(ArgumentError, match="known are sglang"):
            sglang_config.deployment(arguments(debug_train_only=True, sglang_config=write("models: []")))

    def test_prefill_servers(self):
        args = arguments(prefill_num_servers=2, rollout_num_gpus_per_engine=4)
        (model,) = sglang_config.deployment(args).models
        groups = [(g.worker_type, g.num_gpus, g.num_engines) for g in model.server_groups]
        assert groups == [("prefill", 8, 2), ("decode", 8, 2)]
        with pytest.raises(ArgumentError, match=r"--prefill-num-servers 4 .* = 16 slots leave none of --rollout-num"):
            SglangConfig.from_prefill_num_servers(arguments(prefill_num_servers=4, rollout_num_gpus_per_engine=4))

    def test_weights_are_updated_where_the_file_says_so(self, write):
        text = "sglang:\n- {name: a, model_path: /other, update_weights: true, server_groups: [{num_gpus: 16}]}"
        args = arguments(sglang_config=write(text))
        assert sglang_config.deployment(args).models[0].update_weights is True
        assert args.warnings == []

    def test_groups_may_name_the_model(self, write):
        text = "sglang:\n- {name: a, server_groups: [{num_gpus: 16, overrides: {model-path: /other}}]}"
        (model,) = sglang_config.deployment(arguments(sglang_config=write(text))).models
        assert (model.model_path, model.update_weights) == ("/other", False)

    def test_overrides_that_sglang_does_not_have(self, write):
        path = write(
            "sglang:\n- name: a\n  server_groups:\n  - num_gpus: 16\n    overrides:\n      mem_fracton_static: 1\n"
        )
        args = arguments(sglang_config=path)
        config = sglang_config.deployment(args)
        assert config.models[0].server_groups[0].overrides["mem_fracton_static"] == 1
        (warning,) = args.warnings
        assert warning.startswith(f"--sglang-config {path}, line 6: sglang ")
        assert warning.endswith(
            "has no argument mem_fracton_static, and engines do without it; did you mean mem_fraction_static?"
        )

    @pytest.mark.parametrize(
        ("groups", "message"),
        [
            ("[{num_gpus: 8}]", "a 8 = 8 slots, but --rollout-num-gpus is 16; make them equal"),
            (
                "[{num_gpus: 7, num_gpus_per_engine: 2}, {num_gpus: 9}]",
                "7 slots of its regular engines are no multiple",
            ),
            ("[{num_gpus: 16, worker_type: prefill}]", "model a has prefill engines and no decode engines"),
            ("[{num_gpus: 16, worker_type: decode}]", "model a has decode engines and no prefill engines"),
            ("[{num_gpus: 16, worker_type: encoder}]", "model a has only encoder engines, which generate nothing"),
            (
                "[{num_gpus: 8, overrides: {model_path: /b}}, {num_gpus: 8}]",
                r"model a: its groups serve different models \(/b, /models/actor\)",
            ),
        ],
    )
    def test_what_cannot_be_served(self, write, groups, message):
        path = write(f"sglang:\n- {{name: a, server_groups: {groups}}}")
        with pytest.raises(ArgumentError, match=f"--sglang-config {path}: .*{message}"):
            sglang_config.deployment(arguments(sglang_config=path))

    def test_regular_engines_beside_prefill_and_decode_are_idle(self, write):
        kinds = ("regular", "prefill", "decode", "encoder")
        groups = "".join(f"  - {{num_gpus: 4, worker_type: {kind}}}\n" for kind in kinds)
        args = arguments(sglang_config=write("sglang:\n- name: a\n  server_groups:\n" + groups))
        assert sglang_config.deployment(args).models[0].has_encoder_disaggregation
        assert "its router sends requests to the latter only" in args.warnings[0]


class TestClasses:
    def test_from_yaml(self, write):
        config = SglangConfig.from_yaml(write(TWO_MODELS))
        assert [model.name for model in config.models] == ["actor", "judge"]
        assert config.models[0].server_groups[0].num_gpus_per_engine is None

    def test_built_by_hand(self):
        groups = [
            ServerGroupConfig(worker_type="regular", num_gpus=4),
            ServerGroupConfig(worker_type="encoder", num_gpus=2),
        ]
        model = ModelConfig(name="m", num_gpus_per_engine=2, server_groups=groups).resolve(arguments())
        assert [g.num_gpus_per_engine for g in model.server_groups] == [2, 2]
        assert model.has_encoder_disaggregation
        with pytest.raises(ValueError, match="Extra inputs"):
            ServerGroupConfig(worker_type="regular", num_gpus=4, gpus=2)
        with pytest.raises(ValueError, match="greater than 0"):
            ServerGroupConfig(worker_type="regular", num_gpus=0)


KINDS = "regular, prefill, decode, encoder or placeholder"
MISTAKES = [
    ("models: []", ["line 1, sglang: is missing", "line 1, models: unknown key; known are sglang"]),
    ("sglang: []", ["line 1, sglang: expected at least one entry, got an empty list"]),
    (
        "sglang:\n  name: actor\n  server_groups: []\n",
        ["line 1, sglang: expected a list, got a mapping; start every entry with a dash: `- `"],
    ),
    ("sglang:\n- actor\n", ["line 2, sglang[0]: expected a mapping (`name: value` lines), got 'actor'"]),
    (
        "sglang:\n- name: a\n- name: b\n- name: a\n",
        ["line 4, sglang[2].name: names must be unique, and a is on line 2 already"],
    ),
    (
        "sglang:\n"
        "- name: a\n"
        "  server_group: []\n"
        "- name: b\n"
        "  update_weights: 3\n"
        "  server_groups:\n"
        "  - worker_type: regulr\n"
        "    num_gpus: 0\n"
        "    overrides: {tp-size: x, disable_cuda_graph: 5}\n"
        "  - num_gpu: 3\n"
        "    overrides: [a]\n"
        "  engine_groups: []\n",
        ["line 3, sglang[0].server_group: unknown key; did you mean server_groups?",
         "line 5, sglang[1].update_weights: expected true or false, got 3",
         f"line 7, sglang[1].server_groups[0].worker_type: expected one of {KINDS}, got 'regulr'",
         "line 8, sglang[1].server_groups[0].num_gpus: expected a value greater than 0, got 0",
         "line 9, sglang[1].server_groups[0].overrides.tp-size: expected an integer, got 'x'",
         "line 9, sglang[1].server_groups[0].overrides.disable_cuda_graph: expected true or false, got 5",
         "line 10, sglang[1].server_groups[1].num_gpus: is missing",
         "line 10, sglang[1].server_groups[1].num_gpu: unknown key; did you mean num_gpus?",
         "line 11, sglang[1].server_groups[1].overrides: expected a mapping (`name: value` lines), got a list",
         "line 12, sglang[1].engine_groups: the same is given under its other name; keep one"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), MISTAKES, ids=[repr(text)[:40] for text, _ in MISTAKES])
def test_all_mistakes_at_once(mistakes, text, expected):
    assert mistakes(SglangConfig.from_yaml, "--sglang-config", text) == expected
