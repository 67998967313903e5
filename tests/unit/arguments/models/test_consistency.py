"""The model flags of every script against the published config, and every way to get one of them wrong."""

from __future__ import annotations

import json
import re

import pytest

from slime.arguments import ArgumentError
from slime.arguments.rules.hf_config import check_consistency, check_readable
from slime.models.facts import known_config, models
from slime.models.megatron_flags import plain
from tests.support.model_scripts import model_namespace, source

# Numbers that decide how a model is computed, padded or trained, not which model it is.
NOT_THE_MODEL = {
    "--moe-aux-loss-coeff",
    "--moe-router-bias-update-rate",
    "--make-vocab-size-divisible-by",
    "--max-position-embeddings",
    "--seq-length",
    "--mtp-num-layers",
}


SWITCHES = (
    *("--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--qk-layernorm"),
    *("--apply-layernorm-1p", "--post-self-attn-layernorm", "--post-mlp-layernorm", "--rotary-interleaved"),
    "--attention-output-gate",
)
SAME = {"--attention-output-gate": "--use-gated-attention"}
QUERY_KEY_VALUE_SWITCHES = ("--multi-latent-attention", "--add-qkv-bias", "--use-rope-scaling")
EXPERT_SWITCHES = ("--moe-shared-expert-gate", "--moe-router-enable-expert-bias")


def checkpoint(name: str) -> str:
    model = models()[name]
    names = (*model.local_names, *model.repositories) or models()[model.like].repositories
    return f"/models/{names[0].split('/')[-1]}"


def check(words: list[str], hf_checkpoint: str, changed: list[str] | None = None) -> list[str]:
    """Return the warnings of the check of ``words``, with some arguments changed."""
    args = model_namespace(words, hf_checkpoint, changed=changed or [])
    check_consistency(args)
    return args.warnings


def numbers(words: list[str]) -> list[tuple[int, str]]:
    """The place of every number in ``words`` that is part of the model, and the option it belongs to."""
    found = [(place, words[place - 1]) for place, word in enumerate(words) if re.fullmatch(r"[\d.e-]+", word)]
    latent = "--multi-latent-attention" in words
    return [(place, o) for place, o in found if o not in NOT_THE_MODEL and not (latent and o == "--kv-channels")]


@pytest.mark.parametrize("name", models())
def test_the_script_describes_the_published_model(name):
    assert check(source(name), checkpoint(name)) == []


@pytest.mark.parametrize("name", models())
def test_any_changed_number_is_refused_with_both_values(name):
    words = source(name)
    all_experts = any(re.fullmatch(r"\[1\]\*\d+", word) for word in words)
    places = [(p, option) for p, option in numbers(words) if not (all_experts and option == "--ffn-hidden-size")]
    assert len(places) >= 8
    for place, option in places:
        wrong = plain(float(words[place]) * 2)
        # Scaling of the softmax by mscale does nothing to positions that are not stretched.
        if name == "moonlight" and option in ("--mscale", "--mscale-all-dim"):
            continue
        with pytest.raises(ArgumentError) as caught:
            check(words, checkpoint(name), changed=[option, wrong])
        message = str(caught.value)
        assert re.search(rf"{option} {re.escape(wrong)} but .* is {re.escape(words[place])}\. ", message), message
        assert message.count(" but ") == 1


@pytest.mark.parametrize("name", models())
def test_a_forgotten_switch_or_one_too_many_is_refused(name):
    words = source(name)
    latent, experts = "--multi-latent-attention" in words, "--num-experts" in words
    switches = [*SWITCHES, *(EXPERT_SWITCHES if experts else ()), *(() if latent else QUERY_KEY_VALUE_SWITCHES)]
    for switch in switches:
        forgotten = (switch, SAME.get(switch))
        changed = [word for word in words if word not in forgotten] if switch in words else [*words, switch]
        with pytest.raises(ArgumentError, match=f"{switch} (is (given|absent) but|needs) "):
            check(changed, checkpoint(name))


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("deepseek-v3", ["--moe-layer-freq", "1"], r"--moe-layer-freq \[1\]\*61 but .* is \[0\]\*3\+\[1\]\*58"),
        ("qwen3-30B-A3B", ["--moe-layer-freq", "2"], r"--moe-layer-freq (\[1\]\*1\+\[0\]\*1\+?)+ but .* \[1\]\*48"),
        ("qwen3-30B-A3B", ["--moe-router-pre-softmax"], "--moe-router-pre-softmax is given but norm_topk_prob is true"),
        ("glm4.5-355B-A32B", ["--moe-router-score-function", "softmax"], "needs --moe-router-score-function sigmoid"),
        ("qwen3-4B", ["--num-experts", "8"], "--num-experts is 8 but for qwen3 it must be absent"),
        ("moonlight", ["--q-lora-rank", "1536"], "--q-lora-rank 1536 but q_lora_rank is null"),
        ("minimax-m2", ["--moe-shared-expert-intermediate-size", "9"], "intermediate_size is 0"),
        ("deepseek-v3", ["--rope-type", "rope"], "--rope-type rope but the rope_type of rope_scaling is yarn"),
        ("kimi-k2", ["--beta-slow", "2"], "--beta-slow 2 but beta_slow of rope_scaling is 1"),
        ("qwen3-4B", ["--rotary-percent", "0.5"], "--rotary-percent is 0.5 but for qwen3 it must be 1"),
        ("qwen3-4B", ["--multi-latent-attention"], "--multi-latent-attention is given"),
    ],
)
def test_what_a_script_does_not_say_is_compared_too(name, words, message):
    with pytest.raises(ArgumentError, match=message):
        check([*source(name), *words], checkpoint(name))


def test_a_left_out_number_is_refused():
    words = source("qwen3-30B-A3B")
    place = words.index("--num-experts")
    with pytest.raises(ArgumentError, match="--num-experts is absent but num_experts is 128"):
        check([*words[:place], *words[place + 2 :]], checkpoint("qwen3-30B-A3B"))


def test_the_specification_is_needed_but_may_be_ones_own():
    words = source("glm4-9B")
    with pytest.raises(ArgumentError, match=r"--spec is absent but for glm4 it must be slime_plugins\.models\.glm4"):
        check(words[3:], checkpoint("glm4-9B"))
    without_switches = [w for w in words[3:] if w not in ("--post-self-attn-layernorm", "--rotary-interleaved")]
    check(["--spec", "my.module", "my_spec", *without_switches], checkpoint("glm4-9B"))
    with pytest.raises(ArgumentError, match="--hidden-size 1 but hidden_size is 4096"):
        check(["--spec", "my.module", "my_spec", *words[3:], "--hidden-size", "1"], checkpoint("glm4-9B"))


def test_the_rotary_base_of_a_longer_context(tmp_path):
    for name, base in (("Qwen3-30B-A3B-Instruct-2507", "10000000"), ("Qwen3-235B-A22B-Thinking-2507", "5000000")):
        script = "-".join(["qwen3", *name.split("-")[1:3]])
        with pytest.raises(ArgumentError, match=f"--rotary-base 1000000 but rope_theta is {base}"):
            check(source(script), name)
        check(source(script, MODEL_ARGS_ROTARY_BASE=base), name)


def test_a_dense_size_that_no_layer_has_is_not_compared():
    check([*source("qwen3-30B-A3B"), "--ffn-hidden-size", "1"], checkpoint("qwen3-30B-A3B"))


def test_a_checkpoint_on_disk_wins_over_the_published_model(tmp_path):
    directory = tmp_path / "Qwen3-4B"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**known_config("Qwen3-4B"), "num_hidden_layers": 4}))
    with pytest.raises(ArgumentError, match=f"{directory}/config.json: --num-layers 36 but num_hidden_layers is 4"):
        check(source("qwen3-4B"), str(directory))


@pytest.mark.parametrize(
    ("hf_checkpoint", "sentence"),
    [
        (
            "/models/Qwen3-4B",
            "no checkpoint at /models/Qwen3-4B: the model flags were compared with the published Qwen/Qwen3-4B",
        ),
        ("/models/mine", "no checkpoint at /models/mine: the model flags were compared with nothing"),
    ],
)
def test_a_dry_run_says_what_it_compared_with(hf_checkpoint, sentence):
    args = model_namespace(source("qwen3-4B"), hf_checkpoint)
    check_readable(args)
    check_consistency(args)
    assert args.unchecked == [sentence]


def test_a_run_needs_its_checkpoint():
    args = model_namespace(source("qwen3-4B"), "/models/Qwen3-4B", dry_run=False)
    with pytest.raises(ArgumentError, match=r"there is no /models/Qwen3-4B/config\.json"):
        check_readable(args)


def test_positions_that_flags_cannot_stretch_are_warned_of(tmp_path):
    stretched = {**known_config("Qwen3-4B"), "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    (tmp_path / "config.json").write_text(json.dumps(stretched))
    assert check(source("qwen3-4B"), str(tmp_path)) == [
        f"{tmp_path}/config.json: its rope_scaling of the type yarn has no flags"
    ]


@pytest.mark.parametrize(
    ("stated", "sentence"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding_window is 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 128}, "sliding_window is 128"),
        ({"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False, "sliding_window": 4096}, None),
        ({"layer_types": ["full_attention"] * 36, "sliding_window": 128}, None),
        ({"sliding_window": None}, None),
    ],
)
def test_layers_that_flags_cannot_describe_are_warned_of(tmp_path, stated, sentence):
    (tmp_path / "config.json").write_text(json.dumps({**known_config("Qwen3-4B"), **stated}))
    said = check(source("qwen3-4B"), str(tmp_path))
    assert len(said) == (sentence is not None)
    assert all(sentence in line for line in said)
