"""Flags that another one silences are named with it; what a data set says holds over what the run says."""

from __future__ import annotations

import json

import pytest

from slime.arguments import ArgumentError, parse_args
from slime.arguments.rules.loop import refuse_impossible_loop
from slime.arguments.rules.silenced import SILENCERS
from slime.rollout.eval_rollout import _make_samples, eval_sampling_params
from slime.rollout.rm_hub import reward_hook, reward_kind, scored_together
from slime.rollout.sglang_rollout import generate_hook
from slime.utils.misc import load_function
from slime.utils.types import Sample
from tests.support.arguments import dry, minimal_flags

OWN = "tests.unit.preflight.look.hooks.good"
ROLLOUT = "--rollout-function-path tests.unit.preflight.look.hooks.generate"
SFT = "--rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss"
BUFFER = (
    "--rollout-function-path slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout "
    "--rollout-buffer-url http://127.0.0.1:8889"
)
EPISODES = "--custom-generate-function-path slime.rollout.environments.generate --environment-path a.B"
REPLAY = "--load-debug-rollout-data d/{rollout_id}.pt"

# What is given beside the minimum, the flags that have no effect then, and what silences them.
CASES = [
    (f"{ROLLOUT} --rollout-sample-filter-path {OWN}", "--rollout-sample-filter-path", "--rollout-function-path"),
    (f"{ROLLOUT} --dynamic-sampling-filter-path {OWN}", "--dynamic-sampling-filter-path", "--rollout-function-path"),
    (f"{ROLLOUT} --rollout-all-samples-process-path {OWN}", "--rollout-all-samples-process-path", "unless that func"),
    (f"{ROLLOUT} --over-sampling-batch-size 64", "--over-sampling-batch-size", "--rollout-function-path"),
    (f"{ROLLOUT} --partial-rollout", "--partial-rollout", "--rollout-function-path"),
    (f"{SFT} --rollout-sample-filter-path {OWN}", "--rollout-sample-filter-path", "slime.rollout.sft_rollout"),
    (f'{SFT} --apply-chat-template-kwargs {{"enable_thinking":false}}', "--apply-chat-template-kwargs", "sft_rollout"),
    (f"{SFT} --rm-type math", "--rm-type", "slime.rollout.sft_rollout"),
    (f"{SFT} --rollout-stop x", "--rollout-stop", "slime.rollout.sft_rollout"),
    (f"{SFT} --entropy-coef 0.1 --eps-clip 0.3", "--eps-clip and --entropy-coef", "--loss-type sft_loss"),
    (f"{BUFFER} --custom-rm-path {OWN}", "--custom-rm-path", "slime_plugins.rollout_buffer"),
    (f"{BUFFER} --custom-generate-function-path {OWN}", "--custom-generate-function-path", "slime_plugins.rollout_bu"),
    (f"{EPISODES} --rm-type math", "--rm-type", "slime.rollout.environments.generate"),
    (f"{EPISODES} --custom-rm-path {OWN}", "--custom-rm-path", "slime.rollout.environments.generate"),
    ("--partial-rollout", "--partial-rollout", "--rollout-batch-size"),
    (f"{REPLAY} --rm-type math", "--rm-type", "--load-debug-rollout-data"),
    (f"{REPLAY} --rollout-sample-filter-path {OWN}", "--rollout-sample-filter-path", "--load-debug-rollout-data"),
    (f"{REPLAY} --eval-interval 1 --eval-prompt-data e /e.jsonl", "--eval-interval and --eval-prompt-data", "--debug-"),
    ("--debug-rollout-only --save-debug-train-data t/{rollout_id}.pt", "--save-debug-train-data", "--debug-rollout-on"),
    ("--num-rollout 10 --num-epoch 3", "--num-epoch", "--num-rollout"),
    (f"--custom-reward-post-process-path {OWN} --disable-grpo-std-normalization", "--disable-grpo-std", "--custom-rew"),
    (f"--custom-convert-samples-to-train-data-path {OWN} --reward-key k", "--reward-key", "--custom-convert-samples"),
    (f"--custom-advantage-function-path {OWN} --gamma 0.5", "--gamma", "--custom-advantage-function-path"),
    ("--gamma 0.5", "--gamma", "--advantage-estimator grpo"),
    ("--advantage-estimator rloo --disable-grpo-std-normalization", "--disable-grpo-std-normalization", "rloo"),
    (f"--custom-rm-path {OWN} --reward-workers 3", "--reward-workers", "--custom-rm-path"),
    ("--disable-rollout-global-dataset --rollout-shuffle --num-rollout 1", "--rollout-shuffle", "--disable-rollout-gl"),
    ("--lr 1e-5 --lr 2e-5", "--lr", "is given 2 times; the last one holds: --lr 2e-5"),
    ("--rm-type f1 --rm-type=math", "--rm-type", "is given 2 times; the last one holds: --rm-type math"),
    ("--sglang-routing-key group", "--sglang-routing-key", "--router-policy manual or consistent_hashing"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "silent", "by"), CASES)
def test_a_silenced_flag_is_named_with_what_silences_it(words, silent, by):
    found = [said for said in dry(*words.split()).warnings if silent in said]
    assert any(by in said for said in found), dry(*words.split()).warnings


# The same flags where they do have an effect.
@pytest.mark.parametrize(
    "words",
    [
        "--partial-rollout --over-sampling-batch-size 64",
        f"--partial-rollout --dynamic-sampling-filter-path {OWN}",
        f"--rollout-sample-filter-path {OWN} --rollout-all-samples-process-path {OWN}",
        "--advantage-estimator ppo --gamma 0.5 --lambd 0.9",
        "--advantage-estimator reinforce_plus_plus --normalize-advantages --gamma 0.5",
        "--disable-grpo-std-normalization",
        "--rollout-sample-hook-path a.b --rollout-sample-hook-path c.d",
        "--lr 1e-5 --lr 1e-5",
        "--entropy-coef 0.1 --eps-clip 0.3",
    ],
)
def test_flags_with_an_effect_are_not_warned_about(words):
    assert [said for said in dry(*words.split()).warnings if "no effect" in said or "times" in said] == []


def test_what_traits_name_is_what_silences():
    from slime.arguments.command_line import all_flags

    assert {silencer for flag in all_flags() for silencer in flag.traits.silenced_by} == SILENCERS.keys()


def test_a_critic_alone_needs_a_critic():
    for words in (["--critic-train-only"], ["--num-critic-only-steps", "9"]):
        flags = ["--num-rollout", "9", *words]
        with pytest.raises(ArgumentError, match=rf"{words[0]}.*--advantage-estimator grpo there is none"):
            parse_args([*minimal_flags(), *flags])
        [said] = dry(*flags).not_available  # a dry run lists what a run refuses
        assert said.startswith(words[0])
        assert dry(*flags, "--advantage-estimator", "ppo").not_available == []


def test_staleness_in_the_loop_that_has_none(caplog):
    said = "--max-staleness 2 has no effect in train.py"
    refuse_impossible_loop(parse_args([*minimal_flags(), "--max-staleness", "2"]), overlap=False)
    assert said in caplog.text
    caplog.clear()
    flags = ["--max-staleness", "2", "--partial-rollout", "--over-sampling-batch-size", "64"]
    refuse_impossible_loop(parse_args([*minimal_flags(), *flags]), overlap=False)
    assert said not in caplog.text


def test_a_dump_that_is_given_is_not_replaced():
    args = dry("--dump-details", "/d", "--save-debug-train-data", "/mine/{rollout_id}.pt")
    assert args.save_debug_train_data == "/mine/{rollout_id}.pt"
    assert args.save_debug_rollout_data == "/d/rollout_data/{rollout_id}.pt"


@pytest.mark.parametrize(("rate", "warned"), [(1, True), (0.5, True), (1e-3, False), (1e-6, False)])
def test_a_rate_that_no_model_survives(rate, warned):
    assert any(said.startswith("--lr ") for said in dry("--lr", rate).warnings) == warned


@pytest.fixture
def evaluated(tmp_path):
    """The arguments of a run that evaluates the data sets of a file, and the first of them."""
    rows = tmp_path / "e.jsonl"
    rows.write_text('{"input": "q", "label": "1"}\n')

    def parse(data_set, *flags, defaults=None):
        file = tmp_path / "eval.json"
        entry = {"name": "e", "path": str(rows), **data_set}
        file.write_text(json.dumps({"defaults": defaults or {}, "datasets": [entry]}))
        args = dry("--eval-config", file, "--eval-interval", 1, "--eval-max-response-len", 8, *flags)
        return args, args.eval_datasets[0]

    return parse


def first_sample(config):
    class OnePrompt:
        samples = (Sample(prompt="q"),)

    return _make_samples(config, OnePrompt())[0][1]


RUN = ("--custom-rm-path", OWN)


@pytest.mark.parametrize(
    ("data_set", "defaults", "flags", "kind"),
    [
        ({"rm_type": "math"}, {}, RUN, "math"),
        ({}, {"rm_type": "boxed_f1"}, RUN, "boxed_f1"),
        ({"rm_type": "math"}, {"custom_rm_path": OWN}, (), "math"),
        ({"rm_type": "math", "custom_rm_path": OWN}, {}, (), "custom"),
        ({"custom_rm_path": OWN}, {"rm_type": "math"}, (), "custom"),
        ({"custom_rm_path": None}, {}, (*RUN, "--rm-type", "f1"), "f1"),
        ({"custom_rm_path": None, "rm_type": "math"}, {}, RUN, "math"),
        ({"custom_rm_path": None}, {"custom_rm_path": OWN}, ("--rm-type", "gpqa"), "gpqa"),
        ({}, {}, RUN, "custom"),
        ({"rm_type": "mine"}, {}, RUN, "custom"),  # a type that the run's own function knows
    ],
)
def test_the_reward_of_a_data_set_is_the_nearest(data_set, defaults, flags, kind, evaluated):
    args, config = evaluated(data_set, *flags, defaults=defaults)
    sample = first_sample(config)
    assert reward_kind(args, sample) == kind
    assert (reward_hook(args, sample) is not None) == (kind == "custom")
    assert not scored_together(args, sample) or kind == "custom"
    said = [w for w in args.warnings if "scores it, and not --custom-rm-path" in w]
    assert len(said) == (flags == RUN and kind not in ("custom",))


def test_null_switches_off_what_the_run_has(evaluated):
    flags = (
        "--rollout-stop", "x", "--rollout-stop-token-ids", 5, "--label-key", "label", "--eval-min-new-tokens", 2,
        "--custom-generate-function-path", "tests.unit.preflight.look.hooks.generate",
    )  # fmt: skip
    args, config = evaluated({}, *flags)
    params = eval_sampling_params(args, config)
    assert (params["stop"], params["stop_token_ids"], params["min_new_tokens"]) == (["x"], [5], 2)
    assert config.label_key == "label"
    assert generate_hook(args, first_sample(config), load_function) is not None
    names = ("stop", "stop_token_ids", "label_key", "min_new_tokens", "custom_generate_function_path")
    for where in ("data set", "defaults"):
        null = dict.fromkeys(names)
        args, config = evaluated(null if where == "data set" else {}, *flags, defaults=null)
        params = eval_sampling_params(args, config)
        assert (params["stop"], params["stop_token_ids"], params.get("min_new_tokens")) == (None, None, None)
        assert config.label_key is None
        assert generate_hook(args, first_sample(config), load_function) is None
    args, config = evaluated({"temperature": None, "n_samples_per_eval_prompt": None}, "--rollout-temperature", 0.7)
    assert (config.temperature, config.n_samples_per_eval_prompt) == (0.7, 1)


@pytest.mark.parametrize("where", ["data set", "defaults"])
def test_media_of_a_file_need_the_flag(where, evaluated):
    keys = {"multimodal_keys": {"image": "pic"}}
    given = (keys if where == "data set" else {}), ({} if where == "data set" else keys)
    with pytest.raises(ArgumentError, match="data set e: multimodal_keys needs --multimodal-keys, by which"):
        evaluated(given[0], defaults=given[1])


def test_features_that_do_not_exist_are_refused_for_a_role_too():
    with pytest.raises(ArgumentError, match=r"--critic-overrides: --cache-mla-latents is not available yet"):
        dry("--advantage-estimator", "ppo", "--critic-overrides", '{"cache_mla_latents": true}')
