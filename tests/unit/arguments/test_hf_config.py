from __future__ import annotations

import json

import pytest

from slime.arguments import ArgumentError, parse_args
from tests.support.arguments import CONFIG, minimal_flags, parse


def write(directory, **changes):
    config = {k: v for k, v in {**CONFIG, **changes}.items() if v is not None}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 128}, "--hidden-size 64 but hidden_size is 128"),
        ({"num_hidden_layers": 3}, "--num-layers 2 but num_hidden_layers is 3"),
        ({"num_attention_heads": 8}, "--num-attention-heads 4 but num_attention_heads is 8"),
        ({"intermediate_size": 1}, "--ffn-hidden-size 160 but intermediate_size is 1"),
        ({"num_key_value_heads": 4}, "--num-query-groups 2 but num_key_value_heads is 4"),
        ({"head_dim": 32}, "--kv-channels 16 but head_dim is 32"),
        ({"vocab_size": 512}, "--vocab-size 384 but vocab_size is 512"),
        ({"rms_norm_eps": 1e-5}, "--norm-epsilon 1e-6 but rms_norm_eps is 1e-5"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "--rotary-base 10000 but rope_theta is 1000000"),
        ({"rope_parameters": None, "rope_theta": 5e5}, "--rotary-base 10000 but rope_theta is 500000"),
    ],
)
def test_each_difference_is_found(changes, message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        parse("--hf-checkpoint", write(tmp_path, **changes))


def test_a_rotary_base_that_makes_no_difference_is_accepted(tmp_path):
    """Rounded to fp32 it is the same number; a model of the user's own that has other positions does not use it."""
    parse("--hf-checkpoint", write(tmp_path, rope_parameters={"rope_theta": 10000.0003}))
    path = write(tmp_path, model_type="own", rope_parameters={"rope_theta": 1e6})
    words = [word for word in minimal_flags() if word != "--use-rotary-position-embeddings"]
    words += ["--hf-checkpoint", path, "--custom-model-provider-path", "own.model.provider"]
    assert parse_args([*words, "--position-embedding-type", "none"]).rotary_base == 10000
    with pytest.raises(ArgumentError, match="--rotary-base 10000 but rope_theta is 1000000"):
        parse_args([*words, "--position-embedding-type", "rope"])


def test_key_heads_of_delta_nets_are_divided_among_tensor_parallel_ranks(tmp_path):
    own = ["--custom-model-provider-path", "own.model.provider", "--tensor-model-parallel-size", "2"]
    words = [*own, "--actor-num-gpus-per-node", "2", "--hf-checkpoint"]
    parse(*words, write(tmp_path, linear_num_key_heads=6))
    with pytest.raises(ArgumentError, match=r"-size 2 ranks cannot divide the 3 key heads .*linear_num_key_heads"):
        parse(*words, write(tmp_path, linear_num_key_heads=3))


def test_all_differences_are_reported_at_once(tmp_path):
    with pytest.raises(ArgumentError) as caught:
        parse("--hf-checkpoint", write(tmp_path, hidden_size=128, num_hidden_layers=3, vocab_size=1))
    assert str(caught.value).count(" but ") == 3


def test_fields_only_one_side_has_are_left_alone(tmp_path):
    parse("--hf-checkpoint", write(tmp_path, head_dim=None, rms_norm_eps=None, tie_word_embeddings=None))


def test_a_vision_language_model_is_compared_by_its_text_part(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "hidden_size": 9, "text_config": CONFIG})
    )
    parse("--hf-checkpoint", tmp_path)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_an_unreadable_config(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ArgumentError, match=f"--hf-checkpoint {tmp_path}"):
        parse("--hf-checkpoint", tmp_path)


def test_generation_alone_needs_no_model_flags(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    parse("--hf-checkpoint", tmp_path, "--debug-rollout-only", "--hidden-size", 999)


def test_a_switch_too_many_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="--qk-layernorm is given but for llama it must be absent"):
        parse("--hf-checkpoint", write(tmp_path, model_type="llama"))


@pytest.mark.parametrize(
    ("left_out", "attribute", "value"),
    [
        (["--swiglu"], "swiglu", True),
        (["--disable-bias-linear"], "add_bias_linear", False),
        (["--normalization", "RMSNorm"], "normalization", "RMSNorm"),
        (["--use-rotary-position-embeddings"], "position_embedding_type", "rope"),
        (["--group-query-attention"], "group_query_attention", True),
    ],
)
def test_a_forgotten_switch_does_not_train_another_architecture(left_out, attribute, value):
    words = minimal_flags()
    place = words.index(left_out[0])
    del words[place : place + len(left_out)]
    assert getattr(parse_args(words), attribute) == value


def test_a_model_of_ones_own_is_not_second_guessed(tmp_path):
    config = write(tmp_path, model_type="llama")
    parse("--hf-checkpoint", config, "--custom-model-provider-path", "my.provider")


def test_llama_3_scaling_is_accepted(tmp_path):
    scaled = {"rope_theta": 1e4, "rope_type": "llama3", "factor": 32.0}
    config = write(tmp_path, rope_parameters=scaled)
    parse("--hf-checkpoint", config, "--use-rope-scaling", "--rope-scaling-factor", 32)
    assert parse("--hf-checkpoint", config).rope_scaling_factor == 32
    with pytest.raises(ArgumentError, match="--rope-scaling-factor 8 but the factor of rope_scaling is 32"):
        parse("--hf-checkpoint", config, "--use-rope-scaling", "--rope-scaling-factor", 8)


def test_a_group_per_head_needs_no_switch(tmp_path):
    words = minimal_flags()
    words.remove("--group-query-attention")
    one_per_head = write(tmp_path, num_key_value_heads=4)
    parse_args([*words, "--hf-checkpoint", one_per_head])


def test_missing_model_flags_are_suggested(tmp_path):
    from slime.arguments.rules.hf_config import suggested_flags

    assert suggested_flags("/nowhere/mine") == ""
    published = suggested_flags("/nowhere/Qwen3-0.6B")
    assert published.startswith("--num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072 --swiglu ")
    assert published.endswith(" (scripts/models/qwen3-0.6B.sh defines them as MODEL_ARGS)")
    own = suggested_flags(write(tmp_path))
    assert own.startswith("--num-layers 2 --hidden-size 64 ")
    assert "scripts/models" not in own
    unknown = suggested_flags(write(tmp_path, model_type="other"))
    assert "the family other is not known" in unknown


def test_the_suggestion_is_what_the_check_accepts(tmp_path):
    import shlex

    from slime.arguments.rules.hf_config import suggested_flags

    for family in ("qwen2", "qwen3", "llama"):
        config = write(tmp_path, model_type=family, num_hidden_layers=3)
        words = minimal_flags()
        del words[words.index("--num-layers") :]
        parse_args([*words, "--hf-checkpoint", config, *shlex.split(suggested_flags(config))])


def test_a_family_that_is_not_known_is_compared_by_its_numbers_with_a_warning(tmp_path, capsys):
    config, named = write(tmp_path, model_type="other"), ("--model-name", "llama")
    parse("--hf-checkpoint", config, *named)
    assert "the family other is not known" in capsys.readouterr().err
    with pytest.raises(ArgumentError, match="--hidden-size 65 but hidden_size is 64"):
        parse("--hf-checkpoint", config, *named, "--hidden-size", 65, "--kv-channels", 16)


ENCODERS_AND_OTHERS = [
    ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "model_type bert, which slime does not train"),
    ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "model_type t5, which"),
    ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, "model_type mistral, which"),
    ({"model_type": "gemma2"}, "it trains deepseek_v3, deepseek_v32, gemma3, gemma4, glm4, "),
    ({"model_type": "qwen2_vl", "text_config": CONFIG}, "model_type qwen2_vl, which"),
    ({"model_type": None}, "model_type missing, which"),
    ({"architectures": ["Qwen3ForSequenceClassification"]}, "architectures Qwen3ForSequenceClassification, and slime"),
    ({"architectures": ["Qwen3ForTokenClassification"]}, "give the checkpoint of the language model"),
    ({"architectures": ["Qwen3Model"]}, "architectures Qwen3Model, and slime trains models that generate text"),
    ({"architectures": ["LlamaForCausalLMEagle3"]}, "architectures LlamaForCausalLMEagle3"),
]


@pytest.mark.parametrize(("changes", "message"), ENCODERS_AND_OTHERS)
@pytest.mark.parametrize("described", [False, True])
def test_a_model_that_slime_cannot_train_is_refused_whatever_flags_describe_it(tmp_path, changes, message, described):
    words = minimal_flags() if described else minimal_flags()[: minimal_flags().index("--num-layers")]
    with pytest.raises(ArgumentError, match=message):
        parse_args([*words, "--hf-checkpoint", write(tmp_path, **changes)])


@pytest.mark.parametrize(("changes", "message"), ENCODERS_AND_OTHERS[:3])
def test_a_dry_run_of_such_a_model_says_that_a_run_would_be_refused(tmp_path, capsys, changes, message):
    with pytest.raises(SystemExit):
        parse_args([*minimal_flags(), "--hf-checkpoint", write(tmp_path, **changes), "--dry-run"])
    printed = capsys.readouterr().out
    assert "A real run would start" not in printed
    assert "A real run would be refused:" in printed
    assert message in " ".join(printed.split())


def test_engines_serve_what_is_not_trained(tmp_path):
    parse("--hf-checkpoint", write(tmp_path, model_type="mistral"), "--debug-rollout-only")


def test_what_is_given_in_place_of_a_checkpoint_directory_is_named(tmp_path):
    for name, phrase in (
        ("adapter_config.json", "it is an adapter of PEFT, which --lora-adapter-path reads"),
        ("model-Q4_K_M.gguf", "it has model-Q4_K_M.gguf, of another format"),
        ("latest_checkpointed_iteration.txt", "it has latest_checkpointed_iteration.txt, of another format"),
    ):
        directory = tmp_path / name.partition(".")[0]
        directory.mkdir()
        (directory / name).write_text("{}")
        with pytest.raises(ArgumentError, match=phrase):
            parse("--hf-checkpoint", str(directory))
        with pytest.raises(ArgumentError, match="it is a file; give a local"):
            parse("--hf-checkpoint", str(directory / name))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--sglang-speculative-algorithm EAGLE",
            "needs a model that drafts: give --sglang-speculative-draft-model-path",
        ),
        ("--sglang-speculative-algorithm STANDALONE", "needs a model that drafts"),
        ("--sglang-max-running-requests 0", "--sglang-max-running-requests 0: expected at least 1"),
    ],
)
def test_engines_that_could_not_start_are_refused(flags, message):
    with pytest.raises(ArgumentError, match=message):
        parse(*flags.split())


def test_drafts_of_a_model_of_their_own_or_of_mtp_layers_are_accepted(tmp_path):
    parse("--sglang-speculative-algorithm", "EAGLE", "--sglang-speculative-draft-model-path", "/models/draft")
    parse("--sglang-speculative-algorithm", "NGRAM")
    path = write(tmp_path, num_nextn_predict_layers=1)
    parse("--hf-checkpoint", path, "--sglang-speculative-algorithm", "EAGLE")


def warnings(capsys, *flags):
    parse(*flags)
    return capsys.readouterr().err


def test_settings_of_drafts_without_drafts_are_named(capsys):
    accepts = ["--sglang-speculative-algorithm", "NGRAM", "--sglang-speculative-accept-threshold-acc", 0.9]
    assert "--sglang-speculative-accept-threshold-acc 0.9: drafts are accepted more often" in warnings(capsys, *accepts)
    assert "threshold" not in warnings(capsys, *accepts[:2])
    printed = warnings(capsys, "--sglang-speculative-num-steps", 3, "--sglang-speculative-eagle-topk", 1)
    assert "--sglang-speculative-eagle-topk, --sglang-speculative-num-steps without" in printed


def test_lengths_of_evaluations_are_compared_with_the_positions_of_the_model(tmp_path, capsys):
    path = write(tmp_path, max_position_embeddings=512)
    file = tmp_path / "eval.yaml"
    file.write_text("datasets: [{name: long, path: a.jsonl, max_response_len: 600}, {name: short, path: b.jsonl}]")
    flags = ["--hf-checkpoint", path, "--eval-interval", 1, "--eval-config", file, "--dry-run"]
    printed = " ".join(dry_page(capsys, *flags).split())
    assert "max_response_len of the evaluation data set long: 600 is more than the 512 positions" in printed
    assert "data set short:" not in printed
    assert "--eval-max-context-len 700 is more than the 512" in " ".join(
        dry_page(capsys, *flags, "--eval-max-context-len", 700).split()
    )


def dry_page(capsys, *flags):
    with pytest.raises(SystemExit):
        parse(*flags)
    return capsys.readouterr().out


def test_sft_on_what_engines_generate_is_named(capsys):
    printed = warnings(capsys, "--loss-type", "sft_loss", "--disable-compute-advantages-and-returns")
    assert "--loss-type sft_loss with --rollout-function-path slime.rollout.sglang_rollout.generate_rollout" in printed
