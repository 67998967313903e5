"""Engines of a deployment are planned, counted and refused while flags are resolved."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from slime.arguments import ArgumentError
from slime.arguments.placement import engines_of
from tests.support.arguments import CONFIG, dry, parse


def deployment(folder: Path, group: str) -> Path:
    path = folder / "engines.yaml"
    path.write_text(f"sglang:\n  - name: actor\n    server_groups:\n      - {group}\n")
    return path


def test_engines_are_those_of_the_groups() -> None:
    two_models = Path(__file__).parents[2] / "data" / "arguments" / "two_models.yaml"
    args = dry("--sglang-config", two_models, "--rollout-num-gpus", "42")
    assert args.rollout_num_engines == 6  # 1 prefill, 4 decode, 1 of the judge; 8 slots are kept free
    assert dry("--prefill-num-servers", "1", "--rollout-num-gpus", "6").rollout_num_engines == 6


@pytest.mark.parametrize(
    ("group", "slots", "message"),
    [
        ("{num_gpus: 12, num_gpus_per_engine: 12}", 12, "num_gpus_per_engine 12 slots spans nodes of --num-gpus-per-n"),
        ("{num_gpus: 8, num_gpus_per_engine: 3}", 8, "8 slots .* are no multiple of 3 per engine"),
        ("{num_gpus: 8}", 9, "actor 8 = 8 slots, but --rollout-num-gpus is 9; make them equal"),
        ("{num_gpus: 8}", 0, "actor 8 = 8 slots, but --rollout-num-gpus is 0; make them equal"),
    ],
)
def test_groups_that_make_no_whole_engines(tmp_path: Path, group: str, slots: Any, message: str) -> None:
    path = deployment(tmp_path, group)
    with pytest.raises(ArgumentError, match=f"--sglang-config {path}: .*{message}"):
        dry("--sglang-config", path, "--rollout-num-gpus", slots)
    dry("--sglang-config", path, "--rollout-num-gpus", slots, "--debug-train-only")  # no engines: nothing to refuse


def test_nodes_of_another_size_hold_the_same_engines(tmp_path: Path) -> None:
    path = deployment(tmp_path, "{num_gpus: 12, num_gpus_per_engine: 12}")
    flags = ["--hf-checkpoint", "/nowhere", "--sglang-config", path, "--rollout-num-gpus", 12]
    assert dry(*flags, "--num-gpus-per-node", 4).rollout_num_engines == 1


def test_a_tensor_parallel_size_that_no_group_has_is_refused(tmp_path: Path) -> None:
    path = deployment(tmp_path, "{num_gpus: 2, num_gpus_per_engine: 2}")
    flags = ["--sglang-config", path, "--rollout-num-gpus", 2]
    with pytest.raises(ArgumentError, match=f"--sglang-tp-size 1 and --sglang-config {path}: .* = 2 tensor-parallel"):
        dry(*flags, "--sglang-tp-size", 1)
    assert dry(*flags, "--sglang-tp-size", 2).rollout_num_engines == 1


def models(folder: Path, *models: str) -> Path:
    path = folder / "engines.yaml"
    path.write_text("sglang:\n" + "".join(f"  - {model}\n" for model in models))
    return path


PREFILL = "{worker_type: prefill, num_gpus: 1, overrides: {disaggregation_transfer_backend: nixl}}"
DECODE = "{worker_type: decode, num_gpus: 1, overrides: {disaggregation_transfer_backend: nixl}}"
FAKE = PREFILL.replace("nixl", "fake")
MOONCAKE = DECODE.replace("nixl", "mooncake")
JUDGE = "{name: judge, update_weights: false, server_groups: [{num_gpus: 2}]}"


def test_regular_and_placeholder_groups_of_two_models_are_accepted(tmp_path: Path) -> None:
    free = "{worker_type: placeholder, num_gpus: 1}"
    actor = f"{{name: actor, server_groups: [{{num_gpus: 2, num_gpus_per_engine: 2}}, {free}]}}"
    args = parse("--sglang-config", models(tmp_path, actor, JUDGE), "--rollout-num-gpus", 5)
    plans = [(str(plan), plan.gpu_offset, plan.num_gpus, plan.update_weights) for plan in engines_of(args)]
    assert plans == [
        ("engine 0 of model actor", 0, 2, True),
        ("engine 1 of model judge", 3, 1, False),
        ("engine 2 of model judge", 4, 1, False),
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["{name: a, server_groups: [{num_gpus: 1}]}", "{name: b, server_groups: [{num_gpus: 1}]}"],
         "a and b would all get the trainer's weights, and one model can; set update_weights: false for the others"),
        (["{name: a, update_weights: false, server_groups: [{num_gpus: 2}]}"],
         r"no model gets the trainer's weights \(update_weights\)"),
        ([JUDGE, "{name: actor, server_groups: [{num_gpus: 1}]}"],
         "rollouts ask the first model, judge, and the trainer's weights go to actor; list actor first"),
        (["{name: a, server_groups: [{num_gpus: 1}]}", "{name: default, update_weights: false}"],
         "default is a name of the first model"),
        (["{name: a, server_groups: [{num_gpus: 1, overrides: {port: 30000, nccl-port: 1}}]}"],
         "model a: the overrides have nccl_port, port, which slime chooses for each engine; leave it out"),
        ([f"{{name: a, server_groups: [{PREFILL}, {DECODE}, {{num_gpus: 1}}]}}"],
         "model a has regular engines beside prefill and decode engines, and its router sends requests to the latter"),
        ([f"{{name: a, server_groups: [{PREFILL}, {MOONCAKE}]}}"],
         r"the prefill and decode engines of model a differ in disaggregation_transfer_backend \(mooncake, nixl\)"),
        (["{name: a, server_groups: [{worker_type: encoder, num_gpus: 1}, {num_gpus: 1}]}"],
         r"encoder engines \(model a\) are not available yet in this version: SGLang's encoder server takes no"),
        (["{name: a, server_groups: [{num_gpus: 1, overrides: {language_only: true, encoder_urls: ['http://e']}}]}"],
         r"encoder engines \(model a\) are not available yet in this version"),
        ([f"{{name: a, server_groups: [{FAKE}, {FAKE.replace('prefill', 'decode')}]}}"],
         "disaggregation_transfer_backend fake carries nothing from prefill to decode engines; use mooncake or nixl"),
    ],
)  # fmt: skip
def test_models_that_are_refused(tmp_path: Path, given: list[str], message: str) -> None:
    path = models(tmp_path, *given)
    slots = sum(int(number) for text in given for number in re.findall(r"num_gpus: (\d)", text))
    with pytest.raises(ArgumentError, match=f"--sglang-config {path}: {message}"):
        parse("--sglang-config", path, "--rollout-num-gpus", slots)


def test_engines_of_a_frozen_model_have_their_images_encoded_by_others(tmp_path: Path) -> None:
    def parsed(*settings: str, kind: str = "regular") -> Any:
        group = f"{{worker_type: {kind}, num_gpus: 1, overrides: {{{', '.join(settings)}}}}}"
        judge = f"{{name: judge, update_weights: false, server_groups: [{{num_gpus: 1}}, {group}]}}"
        path = models(tmp_path, "{name: actor, server_groups: [{num_gpus: 1}]}", judge)
        return parse("--sglang-config", path, "--rollout-num-gpus", 3)

    language, urls = "language_only: true", "encoder_urls: ['http://e:1']"
    assert engines_of(parsed(language, urls))[2].overrides["encoder_urls"] == ["http://e:1"]
    for alone in (language, urls):
        with pytest.raises(ArgumentError, match="language_only: true and encoder_urls go together: give both"):
            parsed(alone)
    for settings, kind in ((["encoder_only: true"], "regular"), ([], "encoder")):
        with pytest.raises(ArgumentError, match=r"\(model judge\) .* slime starts none; start them with SGLang"):
            parsed(*settings, kind=kind)


@pytest.mark.parametrize("words", ["--sglang-encoder-only", "--sglang-language-only", "--sglang-encoder-urls http://e"])
def test_flags_of_encoder_engines_are_refused(words: str) -> None:
    option = words.split()[0]
    with pytest.raises(ArgumentError, match=f"{option}: encoder engines are not available yet .* takes no new weights"):
        parse(*words.split(), "--rollout-num-gpus", 1)
    parse("--debug-train-only", *words.split())  # where there are none


def test_prefill_and_decode_engines_of_several_sizes(tmp_path: Path) -> None:
    decode = DECODE.replace("num_gpus: 1", "num_gpus: 4, num_gpus_per_engine: 2")
    path = models(tmp_path, f"{{name: actor, server_groups: [{PREFILL}, {decode}]}}", JUDGE)
    args = parse("--sglang-config", path, "--rollout-num-gpus", 7)
    assert [str(plan) for plan in engines_of(args)] == [
        "prefill engine 0 of model actor",
        "decode engine 1 of model actor",
        "decode engine 2 of model actor",
        "engine 3 of model judge",
        "engine 4 of model judge",
    ]


def test_prefill_num_servers_makes_the_same_engines() -> None:
    args = parse("--prefill-num-servers", 1, "--rollout-num-gpus", 3)
    assert [str(plan) for plan in engines_of(args)] == ["prefill engine 0", "decode engine 1", "decode engine 2"]
    assert args.rollout_num_engines == 3


def test_requests_of_disaggregated_engines_are_cut_off_by_a_push() -> None:
    """They continue from the tokens that they have; nothing may be on its way while caches are flushed."""
    flags = ["--prefill-num-servers", 1, "--rollout-num-gpus", 2]
    assert parse(*flags).weight_sync_pause_mode == "abort"
    assert parse("--rollout-num-gpus", 2).weight_sync_pause_mode == "auto"
    for mode in ("retract", "in_place"):
        with pytest.raises(ArgumentError, match=f"--weight-sync-pause-mode {mode}: prefill and decode .* use abort"):
            parse(*flags, "--weight-sync-pause-mode", mode)


def test_what_prefill_engines_exclude() -> None:
    with pytest.raises(ArgumentError, match="a group of model default lies on slots 1-3, of which only those below 2"):
        parse("--prefill-num-servers", 1, "--colocate", "--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 4)
    with pytest.raises(ArgumentError, match="--sglang-disaggregation-mode decode would be that of every engine"):
        parse("--sglang-disaggregation-mode", "decode", "--rollout-num-gpus", 2)


def test_experts_of_prompts_go_from_prefill_to_decode_engines_of_one_form(tmp_path: Path) -> None:
    experts = ["--num-experts", 4, "--moe-ffn-hidden-size", 32, "--use-rollout-routing-replay", "--debug-rollout-only"]
    parse("--prefill-num-servers", 1, "--rollout-num-gpus", 2, *experts)
    with pytest.raises(ArgumentError, match=r"model default with 2 pipeline stages .* own layers only"):
        parse("--prefill-num-servers", 1, "--rollout-num-gpus", 4, "--rollout-num-gpus-per-engine", 2,
              "--sglang-pp-size", 2, *experts)  # fmt: skip
    prefill, decode = (
        "{worker_type: prefill, num_gpus: 1}",
        "{worker_type: decode, num_gpus: 2, num_gpus_per_engine: 2}",
    )
    groups = ["--sglang-config", models(tmp_path, f"{{name: a, server_groups: [{prefill}, {decode}]}}")]
    with pytest.raises(ArgumentError, match="one size only, and those of model a have 1 and 2 GPUs"):
        parse(*groups, "--rollout-num-gpus", 3, "--sglang-disaggregation-transfer-backend", "nixl", *experts)
    parse(*groups, "--rollout-num-gpus", 3, "--sglang-disaggregation-transfer-backend", "mooncake", *experts)


def test_without_a_trainer_every_model_keeps_its_weights(tmp_path: Path) -> None:
    path = models(tmp_path, "{name: a, server_groups: [{num_gpus: 1}]}", "{name: b, server_groups: [{num_gpus: 1}]}")
    args = parse("--sglang-config", path, "--rollout-num-gpus", 2, "--debug-rollout-only")
    assert args.rollout_num_engines == 2


def test_groups_that_take_turns_with_the_trainer(tmp_path: Path) -> None:
    """Those on its slots; the others have their devices for themselves."""
    actor = "{name: actor, server_groups: [{num_gpus: 1}, {num_gpus: 1}, {num_gpus: 1}]}"
    flags = ["--colocate", "--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 5]
    args = parse("--sglang-config", models(tmp_path, actor, JUDGE), *flags)
    assert [plan.offload for plan in engines_of(args)] == [True, True, False, False, False]
    assert not any(plan.offload for plan in engines_of(parse("--rollout-num-gpus", 2)))
    assert all(plan.offload for plan in engines_of(parse(*flags)))  # one group, which begins on them
    with pytest.raises(
        ArgumentError, match="a group of model actor lies on slots 1-2, of which only those below 2 are"
    ):
        parse("--sglang-config", models(tmp_path, actor.replace("{num_gpus: 1}, {num_gpus: 1}]", "{num_gpus: 2}]"),
                                        JUDGE), *flags)  # fmt: skip


def test_the_way_to_a_checkpoint_does_not_matter(tmp_path: Path) -> None:
    """A trailing slash and a link are the same model."""
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "link").symlink_to(checkpoint)
    for path in (f"{checkpoint}/", tmp_path / "link"):
        file = models(tmp_path, f"{{name: a, model_path: {path}, server_groups: [{{num_gpus: 1}}]}}")
        args = parse("--hf-checkpoint", checkpoint, "--sglang-config", file, "--rollout-num-gpus", 1)
        assert [plan.update_weights for plan in engines_of(args)] == [True]


def judge_of(folder: Path, changes: dict[str, Any], group: str) -> list[Any]:
    """Flags for a judge whose ``config.json`` is that of the tests with ``changes``."""
    checkpoint = folder / "judge"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    judge = f"{{name: judge, model_path: {checkpoint}, server_groups: [{group}]}}"
    path = models(folder, "{name: actor, server_groups: [{num_gpus: 1}]}", judge)
    return ["--sglang-config", path, "--rollout-num-gpus", 4]


def test_a_model_is_checked_against_its_own_checkpoint(tmp_path: Path) -> None:
    flags = judge_of(tmp_path, {"num_attention_heads": 5}, "{num_gpus: 3, num_gpus_per_engine: 3}")
    with pytest.raises(
        ArgumentError,
        match=f"model judge, group of regular engines, .*: the 5 attention heads of {tmp_path}/judge cannot be divided "
        "among the 3 tensor",
    ):
        parse(*flags)


def test_a_tied_output_layer_that_engines_would_not_load_is_refused(tmp_path: Path) -> None:
    """SGLang's classes with experts have an ``lm_head`` of their own, whatever the configuration says."""
    changes = {"model_type": "qwen3_moe", "num_experts": 4, "tie_word_embeddings": True}
    flags = judge_of(tmp_path, changes, "{num_gpus: 3, num_gpus_per_engine: 1}")
    with pytest.raises(ArgumentError, match=r"model judge, .* ties its output .* class for qwen3_moe does"):
        parse(*flags)
    (tmp_path / "judge" / "config.json").write_text(json.dumps({**CONFIG, **changes, "tie_word_embeddings": False}))
    assert parse(*flags).rollout_num_engines == 4


def test_a_frozen_model_may_be_quantized_and_of_any_size(tmp_path: Path) -> None:
    changes = {"quantization_config": {"quant_method": "fp8"}, "num_hidden_layers": 7, "num_attention_heads": 6,
               "num_key_value_heads": 3}  # fmt: skip
    assert parse(*judge_of(tmp_path, changes, "{num_gpus: 3, num_gpus_per_engine: 3}")).rollout_num_engines == 2


def test_the_trained_model_may_not_be_quantized(tmp_path: Path) -> None:
    checkpoint = tmp_path / "served"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": {"quant_method": "fp8"}}))
    model = f"{{name: a, model_path: {checkpoint}, update_weights: true, server_groups: [{{num_gpus: 1}}]}}"
    with pytest.raises(ArgumentError, match=rf"{checkpoint} of model a is quantized \(fp8\)"):
        parse("--sglang-config", models(tmp_path, model), "--rollout-num-gpus", 1)


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    judge = "{name: judge, model_path: /nowhere/judge, server_groups: [{num_gpus: 1}]}"
    flags = ["--sglang-config", models(tmp_path, "{name: a, server_groups: [{num_gpus: 1}]}", judge)]
    with pytest.raises(ArgumentError, match=r"model judge: there is no /nowhere/judge/config\.json; give a local"):
        parse(*flags, "--rollout-num-gpus", 2)
    assert "there is no /nowhere/judge/config.json" in "".join(dry(*flags, "--rollout-num-gpus", 2).unchecked)
