"""Arguments of actor and critic from the command line and from the file of roles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slime.arguments.device import finalize_for_device
from slime.arguments.errors import ArgumentError
from slime.arguments.rules.roles import role_args
from tests.support.arguments import dry

PPO = ("--advantage-estimator", "ppo", "--num-rollout", 9)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    """``write(text)`` makes a file of ``text`` and returns its path."""

    def write_file(text: str) -> str:
        path = tmp_path / "roles.yaml"
        path.write_text(text)
        return str(path)

    return write_file


def megatron_checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return folder


def test_without_a_file_the_critic_is_like_the_actor():
    args = dry(*PPO, "--lr", 3e-6, "--kl-coef", 0.1, "--normalize-advantages", "--save", "out", "--save-interval", 1)
    assert role_args(args, "actor") is args
    critic = role_args(args, "critic")
    assert (critic.lr, critic.loss_type, critic.kl_coef) == (3e-6, "value_loss", 0)
    assert (critic.save, critic.load, critic.save_hf) == ("out/critic", args.load, None)
    assert critic.untie_embeddings_and_output_weights
    assert not critic.normalize_advantages
    assert critic.finetune
    assert (args.loss_type, args.kl_coef) == ("policy_loss", 0.1)


def test_roles_have_flags_of_their_own(write):
    text = """megatron:
    - {role: actor, overrides: {lr: 1e-6, clip_grad: 0.5}}
    - {role: critic, overrides: {lr: '1e-5', save: /c, init_method_std: 0.1}}"""
    args = dry(*PPO, "--lr", 3e-6, "--save", "out", "--save-interval", 1, "--megatron-config-path", write(text))
    actor, critic = role_args(args, "actor"), role_args(args, "critic")
    assert (actor.lr, actor.clip_grad, actor.save) == (1e-6, 0.5, "out")
    assert (critic.lr, critic.clip_grad, critic.save, critic.init_method_std) == (1e-5, args.clip_grad, "/c", 0.1)


def test_what_is_set_later_holds_for_the_roles_but_for_what_they_were_given(write):
    text = """megatron:
    - {role: actor, overrides: {fp16: false, accumulate_allreduce_grads_in_fp32: false}}
    - {role: critic, overrides: {lr: 1e-5}}"""
    args = dry(*PPO, "--megatron-config-path", path := write(text))
    Path(path).unlink()  # it was read when the command line was
    finalize_for_device(args, "cuda")
    args.run_dir, args.kl_coef, args.fp16 = "/run", 0.5, True
    actor, critic = role_args(args, "actor"), role_args(args, "critic")
    assert (actor.run_dir, actor.kl_coef, actor.fp16) == ("/run", 0.5, False)
    assert (critic.run_dir, critic.kl_coef, critic.fp16, critic.lr) == ("/run", 0, True, 1e-5)
    assert (args.grad_reduce_in_fp32, critic.grad_reduce_in_fp32, actor.grad_reduce_in_fp32) == (True, True, False)


def test_only_ppo_has_a_critic():
    with pytest.raises(ArgumentError, match="a critic with --advantage-estimator ppo only"):
        role_args(dry(), "critic")


def test_both_resume_from_their_checkpoints(tmp_path):
    save = tmp_path / "out"
    flags = [*PPO, "--save", save, "--load", save, "--save-interval", 1]
    assert role_args(dry(*flags), "critic").finetune
    megatron_checkpoint(save / "critic")  # only the critic has been trained so far
    args = dry(*flags)
    critic = role_args(args, "critic")
    assert (args.finetune, critic.finetune, critic.load) == (True, False, str(save / "critic"))
    assert not critic.no_load_optim
    (save / "latest_checkpointed_iteration.txt").write_text("3")
    args = dry(*flags)
    assert (args.load, role_args(args, "critic").load) == (str(save), str(save / "critic"))
    assert role_args(dry(*flags, "--no-load-optim"), "critic").no_load_optim


def test_a_run_resumes_from_the_critic_that_it_saved_elsewhere(tmp_path, write):
    path = write(f"megatron: [{{role: critic, overrides: {{save: {megatron_checkpoint(tmp_path / 'there')}}}}}]")
    flags = [*PPO, "--save", tmp_path / "out", "--save-interval", 1, "--megatron-config-path", path]
    assert role_args(dry(*flags), "critic").finetune
    critic = role_args(dry(*flags, "--load", tmp_path / "out"), "critic")
    assert (critic.load, critic.finetune) == (str(tmp_path / "there"), False)


def test_the_step_of_the_reference_is_none_of_the_critic(tmp_path):
    save, ref = tmp_path / "out", megatron_checkpoint(tmp_path / "ref")
    flags = [*PPO, "--save", save, "--load", save, "--save-interval", 1, "--ref-load", ref, "--ref-ckpt-step", 3]
    critic = role_args(dry(*flags), "critic")
    assert (critic.load, critic.ckpt_step) == (str(ref), 3)
    megatron_checkpoint(save / "critic")  # only the critic has been trained so far
    args = dry(*flags)
    critic = role_args(args, "critic")
    assert (args.load, args.ckpt_step) == (str(ref), 3)
    assert (critic.load, critic.ckpt_step) == (str(save / "critic"), None)


def test_a_load_of_the_file_counts_when_it_is_a_checkpoint(tmp_path, write):
    there = megatron_checkpoint(tmp_path / "there")
    for load, finetune in ((there, False), (tmp_path / "nowhere", True)):
        path = write(f"megatron: [{{role: critic, overrides: {{load: {load}}}}}]")
        args = dry(*PPO, "--megatron-config-path", path)
        critic = role_args(args, "critic")
        assert critic.finetune is finetune
        assert critic.load == (args.load if finetune else str(load))


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        ("{tensor_model_parallel_size: 2}", "tensor_model_parallel_size is 1 for the actor and 2 for the critic"),
        ("{virtual_pipeline_model_parallel_size: 2}", "micro-batches are counted for the actor's stages"),
        ("{global_batch_size: 3}", "role critic: global_batch_size is 3 and"),
        ("{save: out}", "both write their checkpoints to --save out"),
    ],
)
def test_what_actor_and_critic_must_share(write, overrides, error):
    path = write(f"megatron: [{{role: critic, overrides: {overrides}}}]")
    with pytest.raises(ArgumentError, match=error):
        dry(*PPO, "--save", "out", "--save-interval", 1, "--megatron-config-path", path)


def test_flags_of_the_whole_run_have_no_effect_in_a_role(write):
    path = write("megatron: [{role: actor, overrides: {rollout_num_gpus: 3, hf_checkpoint: /m, lr: 1}}]")
    args = dry("--megatron-config-path", path)
    [warning] = [w for w in args.warnings if "concerns the whole run" in w]
    assert "role actor: rollout_num_gpus: what" in warning


@pytest.mark.parametrize("flag", ["--disable-compute-advantages-and-returns", "--loss-type sft_loss"])
def test_a_critic_without_use_is_refused(flag):
    with pytest.raises(ArgumentError, match=f"does not use.*|{flag} does not use"):
        dry(*PPO, *flag.split())


@pytest.mark.parametrize(
    ("flags", "overrides", "expected"),
    [
        ("", "weight_decay: 0.0", {"start_weight_decay": 0.0, "end_weight_decay": 0.0}),
        ("", "weight_decay: 0.3, end_weight_decay: 0.3", {"start_weight_decay": 0.3, "end_weight_decay": 0.3}),
        ("--eps-clip 0.1", "eps_clip: 0.3", {"eps_clip_high": 0.3}),
        ("--eps-clip 0.1 --eps-clip-high 0.4", "eps_clip: 0.3", {"eps_clip_high": 0.4}),
        ("--eps-clip 0.1 --eps-clip-high 0.4", "eps_clip_high: null", {"eps_clip_high": 0.1}),
        ("", "recompute_activations: true", {"recompute_granularity": "selective"}),
        ("--recompute-activations", "recompute_activations: false", {"recompute_granularity": None}),
    ],
)
def test_values_follow_those_of_the_role(write, flags, overrides, expected):
    path = write(f"megatron: [{{role: actor, overrides: {{{overrides}}}}}]")
    role = role_args(dry("--megatron-config-path", path, "--weight-decay", 0.1, *flags.split()), "actor")
    assert {name: getattr(role, name) for name in expected} == expected
