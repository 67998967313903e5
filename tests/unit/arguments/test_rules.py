"""Consequences of flags: derived attributes, warnings, and the checks that a dry run leaves out."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from slime.arguments import ArgumentError, parse_args
from slime.arguments.command_line import all_flags
from slime.arguments.parse import resolve
from slime.arguments.rules import apply_rules
from tests.support.arguments import CONFIG, dry, minimal_flags, parse

CASES = yaml.safe_load((Path(__file__).parents[2] / "data" / "arguments" / "derivations.yaml").read_text())


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Directories that the words HF, MEGATRON, EMPTY, DSA and SHORT of the table stand for."""
    root = tmp_path_factory.mktemp("places")
    megatron, empty, sparse, short = (root / name for name in ("megatron", "empty", "sparse", "short"))
    for directory in (megatron / "iter_0000003", empty, sparse, short):
        directory.mkdir(parents=True)
    (megatron / "latest_checkpointed_iteration.txt").write_text("3")
    (sparse / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["GlmMoeDsaForCausalLM"]}))
    (short / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 64}))
    words = minimal_flags()
    hf = words[words.index("--hf-checkpoint") + 1]
    return {"HF": hf, "MEGATRON": str(megatron), "EMPTY": str(empty), "DSA": str(sparse), "SHORT": str(short)}


def without(*options, extra=()):
    """The minimal command line without ``options`` (each with one value)."""
    words = minimal_flags()
    for option in options:
        place = words.index(option)
        del words[place : place + 2]
    return [*words, *map(str, extra)]


def resolved(case, places, monkeypatch, parser):
    """The namespace of a case's dry run, with the findings."""
    for name, value in case.get("environment", {}).items():
        monkeypatch.setenv(name, value)
    flags = [filled(word, places) for word in shlex.split(case["flags"])]
    known = all_flags()
    return resolve(without(*case.get("without", ()), extra=["--dry-run", *flags]), known, parser)


def filled(value, places):
    """``value`` with the words of ``places`` replaced."""
    if isinstance(value, str):
        for word, directory in places.items():
            value = value.replace(word, directory)
    return value


@pytest.mark.parametrize("case", CASES, ids=[f"{i} {case['flags'][:60]}" for i, case in enumerate(CASES)])
def test_derivation(case, places, monkeypatch, parser):
    args = resolved(case, places, monkeypatch, parser)
    expected = {name: filled(value, places) for name, value in case["expect"].items()}
    assert {name: getattr(args, name) for name in expected} == expected
    assert not hasattr(args, "offload")
    said = {"warns": args.warnings, "unchecked": args.unchecked, "not_available": args.not_available}
    for kind, found in said.items():
        assert found == [] or case.get(kind) != []
        for sentence in case.get(kind, ()):
            assert any(filled(sentence, places) in one for one in found), found


def test_a_sound_command_line_warns_of_nothing(places):
    sound = ["--n-samples-per-prompt", 2, "--rm-type", "math"]
    assert dry(*sound).warnings == []
    assert dry("--disable-rewards-normalization", "--custom-rm-path", "my.reward").warnings == []
    raised = ["--rollout-max-response-len", 100, "--sglang-context-length", 128]
    warned = dry(*sound, "--hf-checkpoint", places["SHORT"], *raised).warnings
    assert [said for said in warned if "is given 2 times" not in said] == []  # as minimal_flags() have them too


def test_rules_may_be_applied_again(places, monkeypatch, parser):
    """The second time changes nothing: drivers of users call them on a namespace they have changed."""
    for case in CASES:
        args = resolved(case, places, monkeypatch, parser)
        before = dict(vars(args))
        apply_rules(args)
        assert {n: v for n, v in vars(args).items() if n not in ("warnings", "unchecked", "not_available")} == {
            n: v for n, v in before.items() if n not in ("warnings", "unchecked", "not_available")
        }, case


def test_what_a_dry_run_leaves_unchecked_is_refused_by_a_run():
    for flags in (
        ["--prompt-data", "/no/such/prompts.jsonl"],
        ["--load-debug-rollout-data", "/no/such/{rollout_id}.pt"],
        ["--use-kl-loss", "--ref-load", "/no/such/model"],
    ):
        sentence = dry(*flags).unchecked[0]
        with pytest.raises(ArgumentError) as caught:
            parse(*flags)
        assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("estimator", "ignores"), [("grpo", True), ("gspo", True), ("cispo", True), ("rloo", False), ("ppo", False)]
)
def test_a_kl_coefficient_that_the_estimator_ignores_is_warned_of(estimator, ignores):
    warnings = dry("--kl-coef", 0.1, "--advantage-estimator", estimator).warnings
    assert any("--kl-coef 0.1 has no effect" in warning for warning in warnings) == ignores


def test_going_back_to_an_earlier_checkpoint_is_warned_of(tmp_path):
    for step in (1, 3):
        (tmp_path / f"iter_{step:07d}").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    own = ["--load", tmp_path, "--save", tmp_path, "--save-interval", 1, "--ckpt-step"]
    [said] = [warning for warning in dry(*own, 1).warnings if "--ckpt-step" in warning]
    assert said.endswith("after rollout 1, up to rollout 3, will be replaced by those of this run")
    assert not [warning for warning in dry(*own, 3).warnings if "--ckpt-step" in warning]


def test_rollout_only_gives_all_slots_to_engines():
    for slots, nodes, per_node in [(4, 1, 4), (8, 1, 8), (16, 2, 8), (0, 0, 0)]:
        args = parse("--debug-rollout-only", "--colocate", "--rollout-num-gpus", slots)
        assert (args.actor_num_nodes, args.actor_num_gpus_per_node) == (nodes, per_node)


def test_the_batch_identity_holds():
    args = parse_args(without("--global-batch-size", extra=["--n-samples-per-prompt", 8, "--num-steps-per-rollout", 2]))
    assert args.global_batch_size * args.num_steps_per_rollout == args.rollout_batch_size * args.n_samples_per_prompt


@pytest.mark.parametrize("flag", ["--rollout-function-path", "--custom-convert-samples-to-train-data-path"])
def test_some_plug_ins_make_more_rollouts_than_prompts_times_n(flag):
    assert parse("--global-batch-size", 64, flag, "my.function").global_batch_size == 64


def test_a_generate_function_does_not():
    """A step takes trajectories: the samples that one trajectory returns count as one."""
    with pytest.raises(ArgumentError, match="4 samples per rollout, fewer than --global-batch-size 64"):
        parse("--global-batch-size", 64, "--custom-generate-function-path", "my.generate")


@pytest.mark.parametrize("flag", ["--custom-generate-function-path", "--custom-convert-samples-to-train-data-path"])
def test_several_samples_for_one_may_not_divide(flag):
    """A run ends at the first step whose samples do not make whole micro-batches on every rank."""
    warning = f"{flag} my.function may return several samples for one, and a step whose samples are no multiple of"
    on_two = ["--actor-num-gpus-per-node", 2, flag, "my.function"]
    dynamic = ["--use-dynamic-batch-size", "--max-tokens-per-gpu", 512]
    said = dry(*on_two).warnings
    assert [sentence for sentence in said if warning in sentence]
    assert "--micro-batch-size 1 x 2 data-parallel ranks" in " ".join(said)
    for words in ([flag, "my.function"], [*on_two, *dynamic]):
        assert warning not in " ".join(dry(*words).warnings)


def test_dynamic_batches_need_not_divide():
    words = ["--rollout-batch-size", 6, "--global-batch-size", 6, "--actor-num-gpus-per-node", 4]
    assert parse(*words, "--use-dynamic-batch-size", "--max-tokens-per-gpu", 512).data_parallel_size == 4


def test_no_prompts_are_needed_to_evaluate_once(tmp_path):
    (tmp_path / "e.jsonl").write_text("{}")
    words = ["--num-rollout", 0, "--eval-interval", 1, "--eval-prompt-data", "a", tmp_path / "e.jsonl"]
    assert parse_args(without("--prompt-data", extra=words)).num_rollout == 0


def test_sizes_of_the_model_are_derived():
    assert parse_args(without("--kv-channels")).kv_channels == 64 // 4


@pytest.mark.parametrize(
    ("flags", "stages"),
    [
        ("--num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2", 2),
        ("--num-layers 8 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4", 4),
        ("--num-layers 8 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2 "
         "--num-virtual-stages-per-pipeline-rank 2", 2),
    ],
)  # fmt: skip
def test_virtual_stages(flags, stages):
    hf = ["--hf-checkpoint", "/nowhere/model"]
    args = dry(*shlex.split(flags), *hf, "--actor-num-gpus-per-node", 2)
    assert args.virtual_pipeline_model_parallel_size == stages
    assert args.overlap_p2p_comm is True
    assert args.batch_p2p_comm is False


def test_attributes_that_plugins_read_are_there():
    """Those that a rule derives; the run itself adds router addresses by model and the lengths it finds out."""
    names = [
        "eval_datasets",
        "rollout_external",
        "rollout_external_engine_infos",
        "rollout_num_engines",
        "use_critic",
        "critic_num_nodes",
        "critic_num_gpus_per_node",
        "sglang_tp_size",
        "sglang_dp_size",
        "sglang_pp_size",
        "sglang_ep_size",
        "sglang_router_ip",
        "sglang_router_port",
        "num_rollout",
        "start_rollout_id",
        "wandb_run_id",
        "rank",
        "world_size",
        "compute_advantages_and_returns",
        "grpo_std_normalization",
        "rewards_normalization",
        "rollout_global_dataset",
        "wandb_random_suffix",
        "data_parallel_size",
    ]
    for flags in ([], ["--colocate"], ["--debug-rollout-only"], ["--debug-train-only"], ["--num-steps-per-rollout", 1]):
        args = parse(*flags)
        missing = [name for name in names if not hasattr(args, name)]
        assert missing == (["data_parallel_size"] if "--debug-rollout-only" in flags else []), flags


def test_nixl_is_asked_for_where_train_data_travel_by_it(monkeypatch):
    monkeypatch.setattr("slime.arguments.rules.weight_sync.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--rollout-data-transport nixl needs the package nixl, .* pip install nixl"):
        parse("--rollout-data-transport", "nixl")
    assert parse().rollout_data_transport == "object-store"


def test_a_run_leaves_the_settings_of_the_log_prob_server_alone(monkeypatch, capsys):
    """Clusters set names like TEACHER_PORT for purposes of their own."""
    monkeypatch.setenv("TEACHER_PORT", "tcp://10.0.0.1:80")
    assert parse().teacher_port == 7999
    server = "python -m slime.backends.megatron_utils.server.megatron_server"
    parse("--teacher-port", "80")
    assert f"--teacher-port has no effect without {server}" in capsys.readouterr().err


def test_slime_validate_args_is_the_public_name_of_the_rules():
    from slime.utils import arguments

    assert arguments.slime_validate_args is apply_rules
    assert arguments.parse_args is parse_args
