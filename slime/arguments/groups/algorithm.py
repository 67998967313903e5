"""Advantages, losses and corrections."""

from __future__ import annotations

from typing import Literal

from slime.arguments.group import ArgumentGroup, flag
from slime.arguments.types import DottedPath


class Algorithm(ArgumentGroup):
    """What is optimised."""

    title = "algorithm"

    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = flag("policy_loss", "loss of the actor")
    custom_loss_function_path: DottedPath | None = flag(None, "dotted path of the loss, with --loss-type custom_loss")
    advantage_estimator: Literal[
        "grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"
    ] = flag("grpo", "how advantages are computed; ppo trains a critic")
    compute_advantages_and_returns: bool = flag(
        True, "leave advantages out (SFT, custom losses)", option="--disable-compute-advantages-and-returns"
    )
    custom_advantage_function_path: DottedPath | None = flag(
        None, "dotted path of a function that fills in the advantages"
    )
    eps_clip: float = flag(0.2, "lower clip of the policy ratio", ge=0)
    eps_clip_high: float | None = flag(None, "upper clip of the policy ratio; default: --eps-clip", ge=0)
    eps_clip_c: float | None = flag(None, "bound of dual clipping", gt=1)
    value_clip: float = flag(0.2, "clip of the value loss", ge=0)
    num_critic_only_steps: int = flag(0, "rollouts at the start that train only the critic", ge=0)
    kl_coef: float = flag(0.0, "weight of the KL penalty in the advantage (needs a reference model)")
    use_kl_loss: bool = flag(False, "add the KL to the reference model to the loss")
    kl_loss_coef: float = flag(0.0, "weight of that KL")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = flag("k1", "estimator of the KL")
    use_unbiased_kl: bool = flag(False, "multiply the KL by the policy ratio")
    ref_update_interval: int | None = flag(None, "copy the actor to the reference model every N rollouts", ge=1)
    entropy_coef: float = flag(0.0, "weight of the entropy bonus")
    gamma: float = flag(1.0, "discount", ge=0, le=1)
    lambd: float = flag(1.0, "lambda of generalised advantage estimation", ge=0, le=1)
    normalize_advantages: bool = flag(False, "whiten advantages over the batch")
    grpo_std_normalization: bool = flag(
        True, "do not divide group advantages by their standard deviation", option="--disable-grpo-std-normalization"
    )
    rewards_normalization: bool = flag(
        True, "use raw rewards, without the group mean taken off", option="--disable-rewards-normalization"
    )
    use_rollout_entropy: bool = flag(False, "compute the entropy in the log-prob pass too")
    reset_optimizer_states: bool = flag(False, "forget Adam's moments before every rollout's training")
    use_stateless_adam: bool = flag(False, "Adam without stored moments")
    keep_old_actor: bool = flag(False, "keep the weights that generated the data for the old log-probs")


class OffPolicy(ArgumentGroup):
    """Corrections for the difference between the policy that generated and the one that trains."""

    title = "off-policy corrections"

    use_rollout_logprobs: bool = flag(False, "take the engine's log-probs as those of the old policy")
    use_tis: bool = flag(False, "truncated importance sampling between engine and trainer")
    tis_clip: float = flag(2.0, "upper bound of its weights", gt=0)
    tis_clip_low: float = flag(0.0, "lower bound of its weights", ge=0)
    custom_tis_function_path: DottedPath | None = flag(None, "dotted path of your own importance weights")
    custom_pg_loss_reducer_function_path: DottedPath | None = flag(
        None, "dotted path of your own reducer of the policy loss"
    )
    get_mismatch_metrics: bool = flag(
        False, "compute the metrics of --custom-tis-function-path; the hook decides about the loss"
    )
    use_routing_replay: bool = flag(False, "record expert routing in the log-prob pass and replay it in training")
    use_rollout_routing_replay: bool = flag(False, "replay the engine's expert routing in training")
    use_opsm: bool = flag(False, "mask sequences that are too far off policy")
    opsm_delta: float = flag(1e-4, "threshold of --use-opsm", ge=0)


class Distillation(ArgumentGroup):
    """On-policy distillation."""

    title = "on-policy distillation"

    use_opd: bool = flag(False, "train towards a teacher's log-probs")
    opd_type: Literal["sglang", "megatron"] | None = flag(None, "where the teacher runs")
    opd_kl_coef: float = flag(1.0, "weight of the KL to the teacher")
    opd_teacher_load: str | None = flag(None, "teacher checkpoint, with --opd-type megatron")
    opd_teacher_ckpt_step: int | None = flag(None, "its step")


class MultiTokenPrediction(ArgumentGroup):
    """Multi-token prediction heads."""

    title = "multi-token prediction"

    mtp_num_layers: int | None = flag(None, "multi-token prediction layers", ge=1)
    mtp_loss_scaling_factor: float = flag(0.2, "weight of their loss")
    enable_mtp_training: bool = flag(False, "train them")
