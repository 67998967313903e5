"""Facts about the model in config.json need no flags."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.arguments import ArgumentError, parse_args
from slime.arguments.rules import model_defaults
from slime.arguments.rules.roles import role_args
from slime.models.facts import models
from tests.support.arguments import CONFIG, MODEL_FLAGS, dry, minimal_flags
from tests.support.model_scripts import source

RUN = minimal_flags()[: -len(MODEL_FLAGS)]


# What scripts choose that no config says: (from the config alone, with the script's flags).
ONLY_IN_SCRIPTS: dict[str, dict[str, tuple[Any, Any]]] = {
    "qwen3.5-35B-A3B-vl": {  # the same checkpoint, with its vision tower
        "spec": (
            ["slime_plugins.models.qwen3_5", "get_qwen3_5_spec"],
            ["slime_plugins.models.qwen3_5_vl", "get_qwen3_5_vl_model_provider"],
        )
    },
    "mimo-7B-rl": {"mtp_num_layers": (None, 1)},
    "glm4-32B": {"seq_length": (4096, 32768), "max_position_embeddings": (4096, 32768)},  # read by no rotary embedding
    "kimi-k2": {"kv_channels": (128, 64)},  # not read by latent attention
    "kimi-k2-thinking": {"kv_channels": (128, 64)},
    "moonlight": {"masked_softmax_fusion": (True, False), "mscale_all_dim": (0.0, 1.0)},  # its positions are unscaled
}


def write(directory: Path, **changes: Any) -> str:
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def resolved(*words: Any) -> dict[str, Any]:
    """The attributes of a run without those that say what was given."""
    values = vars(parse_args([*RUN, *map(str, words)]))
    return {name: value for name, value in values.items() if name != "explicit_flags"}


def planned(*words: Any) -> dict[str, Any]:
    """The same of a dry run, which continues with models that cannot be trained yet."""
    values = vars(parse_dry(*map(str, words)))
    return {name: value for name, value in values.items() if name not in ("explicit_flags", "not_available")}


def differing(one: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = sorted({*one, *other})
    return {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}


@pytest.mark.parametrize("name", models())
def test_the_config_alone_is_the_same_run_as_the_flags_of_the_script(name, tmp_path):
    config = models()[name].config
    checkpoint = write(tmp_path, **{**dict.fromkeys(CONFIG), **config})
    alone = planned("--hf-checkpoint", checkpoint)
    typed = planned("--hf-checkpoint", checkpoint, *source(name))
    assert differing(alone, typed) == ONLY_IN_SCRIPTS.get(name, {})
    assert (alone["num_layers"], alone["swiglu"], alone["normalization"]) == (
        config["num_hidden_layers"],
        True,
        "RMSNorm",
    )


def test_without_any_model_flag_the_tiny_model_is_the_one_of_its_flags():
    assert differing(resolved(), resolved(*MODEL_FLAGS)) == {
        # the same thing, said once as the kind of embedding and once as a switch of older scripts
        "use_rotary_position_embeddings": (False, True)
    }


def test_a_command_line_that_describes_its_model_stays_what_it_was(tmp_path):
    """The computation of an expert model has Megatron's defaults, as before; the model's shape is the checkpoint's."""
    config = models()["qwen3-30B-A3B"].config
    checkpoint = write(tmp_path, **{**dict.fromkeys(CONFIG), **config})
    sizes = "--num-layers 48 --hidden-size 2048 --num-attention-heads 32 --vocab-size 151936"
    args = resolved("--hf-checkpoint", checkpoint, *sizes.split())
    assert (args["moe_grouped_gemm"], args["moe_router_dtype"]) == (False, None)
    assert (args["num_experts"], args["swiglu"], args["qk_layernorm"]) == (128, True, True)


@pytest.mark.parametrize(
    ("changes", "attribute", "value"),
    [
        ({}, "qk_layernorm", True),
        ({"model_type": "llama"}, "qk_layernorm", False),
        ({"model_type": "qwen2"}, "add_qkv_bias", True),
        ({"tie_word_embeddings": False}, "untie_embeddings_and_output_weights", True),
        ({"num_key_value_heads": 1}, "num_query_groups", 1),
        ({"rms_norm_eps": 3e-6}, "layernorm_epsilon", 3e-6),
        ({"rope_parameters": None, "rope_theta": 5e5}, "rotary_base", 500000),
        ({"head_dim": None}, "kv_channels", 16),
        ({"head_dim": 32}, "kv_channels", 32),
        ({"vocab_size": 385}, "padded_vocab_size", 512),
    ],
)
def test_each_value_is_the_checkpoints(changes, attribute, value, tmp_path):
    assert resolved("--hf-checkpoint", write(tmp_path, **changes))[attribute] == value


def test_a_given_flag_is_still_compared(tmp_path):
    with pytest.raises(ArgumentError, match="--num-layers 3 but num_hidden_layers is 2"):
        resolved("--num-layers", 3)
    with pytest.raises(ArgumentError, match="--qk-layernorm is given but for llama it must be absent"):
        resolved("--hf-checkpoint", write(tmp_path, model_type="llama"), "--qk-layernorm")
    file = tmp_path / "run.yaml"
    file.write_text("swiglu: false\n")
    with pytest.raises(ArgumentError, match="--swiglu is absent but for qwen3 it must be given"):
        resolved("--config", file)


def test_defaults_of_a_users_own_parser_are_compared_too():
    def mine(parser):
        parser.set_defaults(num_layers=3)
        return parser

    with pytest.raises(ArgumentError, match="--num-layers 3 but num_hidden_layers is 2"):
        parse_args(RUN, mine)


def test_generation_alone_takes_nothing():
    args = resolved("--debug-rollout-only")
    assert (args["num_layers"], args["swiglu"]) == (None, False)


def test_a_family_that_is_not_known_is_described_by_hand(tmp_path):
    checkpoint, named = write(tmp_path, model_type="other"), ("--model-name", "llama")
    with pytest.raises(ArgumentError) as caught:
        resolved("--hf-checkpoint", checkpoint, *named)
    message = str(caught.value)
    assert "--num-layers, --hidden-size, --num-attention-heads, --vocab-size missing" in message
    assert "--num-layers 2 --hidden-size 64" in message
    assert "the family other is not known" in message
    described = resolved("--hf-checkpoint", checkpoint, *named, *MODEL_FLAGS)
    assert described["num_query_groups"] == 2


def test_a_model_of_ones_own_gets_what_it_does_not_say(tmp_path):
    own = ("--custom-model-provider-path", "my.provider")
    undescribed = resolved(*own)
    assert (undescribed["num_layers"], undescribed["swiglu"], undescribed["qk_layernorm"]) == (2, True, True)
    sizes = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--vocab-size", "384"]
    described = resolved(*own, *sizes)
    assert (described["swiglu"], described["qk_layernorm"], described["spec"]) == (False, False, None)
    assert (described["num_query_groups"], described["kv_channels"]) == (
        2,
        16,
    )  # the config's words, which are compared
    other = write(tmp_path, model_type="other")
    assert resolved("--hf-checkpoint", other, *own)["num_layers"] == 2


def test_a_specification_of_ones_own_stays(tmp_path):
    checkpoint = write(tmp_path, **{**dict.fromkeys(CONFIG), **models()["glm4-9B"].config})
    assert resolved("--hf-checkpoint", checkpoint)["spec"] == ["slime_plugins.models.glm4", "get_glm_spec"]
    args = resolved("--hf-checkpoint", checkpoint, "--spec", "my.module", "my_spec")
    assert (args["spec"], args["post_mlp_layernorm"]) == (["my.module", "my_spec"], True)


def test_a_critic_of_another_size_is_described_by_its_own_checkpoint(tmp_path):
    small = write(tmp_path / "small", num_hidden_layers=1, hidden_size=32, intermediate_size=96, head_dim=None)
    file = tmp_path / "roles.yaml"
    file.write_text(f"megatron: [{{role: critic, overrides: {{load: {small}, ffn_hidden_size: 80}}}}]")
    words = ("--advantage-estimator", "ppo", "--num-rollout", 9, "--megatron-config-path", file)
    words = tuple(map(str, words))
    args = parse_args([*RUN, *words])
    critic = role_args(args, "critic")
    assert (args.num_layers, args.hidden_size, args.ffn_hidden_size, args.kv_channels) == (2, 64, 160, 16)
    assert (critic.num_layers, critic.hidden_size, critic.ffn_hidden_size, critic.kv_channels) == (1, 32, 80, 8)
    assert critic.load == small
    typed = role_args(parse_args([*RUN, *MODEL_FLAGS, *words]), "critic")
    assert (typed.num_layers, typed.hidden_size) == (2, 64)  # what the command line says holds for both roles


def test_a_written_configuration_takes_the_model_from_the_checkpoint_again(tmp_path):
    path = tmp_path / "run.yaml"
    first = resolved("--dump-config", path)
    again = vars(parse_args(["--config", str(path)]))
    for name in ("num_layers", "swiglu", "num_query_groups", "rotary_base"):
        assert again[name] == first[name]
    assert "num_layers" not in again["explicit_flags"]


def test_a_dry_run_without_the_checkpoint_takes_the_published_model():
    args = parse_dry("--hf-checkpoint", "/models/Qwen3-4B")
    assert (args.num_layers, args.hidden_size) == (36, 2560)
    assert model_defaults.summary(args)[0][0] == "from the published Qwen/Qwen3-4B"


def parse_dry(*words: str) -> Namespace:
    from slime.arguments.parse import resolve
    from tests.support.arguments import known

    return resolve([*RUN, "--dry-run", *words], *known())


def test_it_is_said_what_was_taken(capsys):
    with pytest.raises(SystemExit):
        parse_args([*RUN, "--hidden-size", "64", "--dry-run"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "/config.json --num-layers 2 --ffn-hidden-size 160 --swiglu --disable-bias-linear" in printed
    assert "dropout none" in printed
    summary = dict(model_defaults.summary(parse_dry("--hidden-size", "64")))
    [taken] = [words for label, words in summary.items() if label.endswith("config.json")]
    assert "--hidden-size" not in taken
    assert "--qk-layernorm" in shlex.split(taken)


def test_there_is_no_dropout_unless_it_is_given():
    args = resolved()
    assert (args["hidden_dropout"], args["attention_dropout"]) == (0.0, 0.0)
    assert resolved("--hidden-dropout", 0.1)["hidden_dropout"] == 0.1


def test_dropout_that_is_given_is_warned_of():
    [warning] = [w for w in dry("--attention-dropout", 0.1).warnings if "dropout" in w]
    assert warning.startswith("--attention-dropout 0.1: only training drops values")
    assert not [w for w in dry("--attention-dropout", 0).warnings if "dropout" in w]


def test_all_that_is_missing_is_said_at_once():
    with pytest.raises(ArgumentError) as caught:
        parse_args([])
    lines = str(caught.value).splitlines()
    for part in (
        "--hf-checkpoint", "--rollout-batch-size", "--rollout-num-gpus", "--global-batch-size", "--num-rollout",
        "--prompt-data", "--rollout-max-response-len",
    ):  # fmt: skip
        assert sum(part in line for line in lines) >= 1, part
    assert len(lines) == 7
    assert "--num-layers" not in str(caught.value)
    assert "HF_CHECKPOINT" not in str(caught.value)


def test_a_command_line_completed_by_the_one_message_is_accepted():
    start = RUN[:2]
    with pytest.raises(ArgumentError) as caught:
        parse_args(start)
    assert len(str(caught.value).splitlines()) == 6
    parse_args(RUN)
