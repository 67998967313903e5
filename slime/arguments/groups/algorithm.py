"""Advantages, losses, corrections, and the teachers of distillation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from slime.algorithms.estimators import ESTIMATORS, WITH_CRITIC, names_where
from slime.arguments.group import ArgumentGroup, DottedPath, flag
from slime.arguments.traits import Contract, Needs

if TYPE_CHECKING:
    EstimatorName = str
else:
    EstimatorName = Literal[tuple(ESTIMATORS)]

CRITIC = "--advantage-estimator " + " or ".join(e.name for e in ESTIMATORS.values() if e.needs_critic)


class Algorithm(ArgumentGroup):
    """Training objective: loss, advantages, KL, entropy."""

    title = "algorithm"

    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = flag(
        "policy_loss",
        "loss of the actor: policy gradient, supervised fine-tuning, or --custom-loss-function-path",
        critic="value_loss",
    )
    custom_loss_function_path: DottedPath | None = flag(
        None,
        "dotted path of your own loss, with --loss-type custom_loss",
        hook=Contract("fn(args, batch, logits, sum_of_sample_mean)", 4, caller="trainer"),
    )
    advantage_estimator: EstimatorName = flag(
        "grpo",
        f"how advantages are computed from rewards; {WITH_CRITIC} trains a critic for it",
        same_for_roles="batches",
    )
    compute_advantages_and_returns: bool = flag(
        True,
        "compute no log-probs and advantages before the step (SFT, custom losses)",
        option="--disable-compute-advantages-and-returns",
    )
    custom_advantage_function_path: DottedPath | None = flag(
        None,
        "dotted path of your own function that computes advantages, instead of --advantage-estimator",
        hook=Contract("fn(args, rollout_data)", 2, caller="trainer"),
        without_advantages=True,
    )
    eps_clip: float = flag(0.2, "the policy ratio is clipped below at 1 - this", ge=0, silenced_by=("sft_loss",))
    eps_clip_high: float | None = flag(
        None,
        "the policy ratio is clipped above at 1 + this; default: --eps-clip",
        ge=0,
        follows="eps_clip",
        silenced_by=("sft_loss",),
    )
    eps_clip_c: float | None = flag(
        None,
        "bound of the loss where the advantage is negative (dual clipping); default: none",
        gt=1,
        silenced_by=("sft_loss",),
    )
    value_clip: float = flag(
        0.2,
        "how far values may move in a step of the critic before its loss is clipped",
        ge=0,
        needs=CRITIC,
    )
    num_critic_only_steps: int = flag(
        0,
        f"rollouts at the start that train only the critic, with --advantage-estimator {WITH_CRITIC}",
        ge=0,
        needs=CRITIC,
        same_for_roles="batches",
    )
    kl_coef: float = flag(
        0.0,
        "weight of the KL to the reference model (--ref-load) that is subtracted from the token rewards, with "
        f"--advantage-estimator {names_where(lambda estimator: estimator.kl)}; 0: none",
        silenced_by=("sft_loss",),
        without_advantages=True,
    )
    use_kl_loss: bool = flag(
        False,
        "add the KL to the reference model (--ref-load) to the loss, with weight --kl-loss-coef",
        silenced_by=("sft_loss",),
        critic=False,
    )
    kl_loss_coef: float = flag(
        0.0, "weight of the KL of --use-kl-loss", needs="--use-kl-loss", silenced_by=("sft_loss",)
    )
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = flag(
        "k1", "estimator of the KL, for --kl-coef and --use-kl-loss", needs="--use-kl-loss or --kl-coef"
    )
    use_unbiased_kl: bool = flag(False, "multiply the KL of --use-kl-loss by the policy ratio", needs="--use-kl-loss")
    ref_update_interval: int | None = flag(
        None,
        "copy the actor to the reference model every N rollouts; default: never",
        ge=1,
        needs="--use-kl-loss or --kl-coef",
    )
    entropy_coef: float = flag(0.0, "weight of the entropy bonus in the loss", silenced_by=("sft_loss",))
    gamma: float = flag(
        1.0, "discount of later rewards", ge=0, le=1, silenced_by=("own advantages", "no discount", "sft_loss")
    )
    lambd: float = flag(
        1.0,
        f"lambda of generalized advantage estimation, with --advantage-estimator {WITH_CRITIC}",
        ge=0,
        le=1,
        needs=CRITIC,
        silenced_by=("own advantages", "sft_loss"),
    )
    normalize_advantages: bool = flag(
        False, "whiten advantages over the batch: mean 0, standard deviation 1", without_advantages=True, critic=False
    )
    grpo_std_normalization: bool = flag(
        True,
        "do not divide a group's rewards by their standard deviation",
        option="--disable-grpo-std-normalization",
        silenced_by=("own conversion", "own post-processing", "no scaling"),
    )
    rewards_normalization: bool = flag(
        True,
        "use rewards as they are, without taking the mean of the group off",
        option="--disable-rewards-normalization",
        silenced_by=("own conversion", "own post-processing", "no baseline"),
    )
    reward_statistics: Literal["trajectories", "samples"] = flag(
        "trajectories",
        "what a group's mean and standard deviation of rewards are taken over, where a trajectory may be several "
        "samples: it counts once, or as often as it has samples (slime <= 0.3.1)",
        silenced_by=("own conversion", "own post-processing"),
    )
    use_rollout_entropy: bool = flag(
        False, "compute the entropy in the log-prob pass too, for your hooks", without_advantages=True
    )
    reset_optimizer_states: bool = flag(False, "forget Adam's moments before the training on every rollout")
    use_stateless_adam: bool = flag(False, "Adam without stored moments, to save memory")
    keep_old_actor: bool = flag(False, "keep the weights that generated the data, for the old log-probs", critic=False)


class OffPolicy(ArgumentGroup):
    """Corrections for the difference between the policy that generated and the one that trains."""

    title = "off-policy corrections"

    use_rollout_logprobs: bool = flag(
        False,
        "take the engine's log-probs as those of the old policy, instead of computing them with the trainer",
        silenced_by=("sft_loss",),
        critic=False,
    )
    use_tis: bool = flag(
        False, "weight the loss by truncated importance sampling between engine and trainer", silenced_by=("sft_loss",)
    )
    tis_clip: float = flag(
        2.0, "upper bound of the weights of --use-tis", gt=0, needs="--use-tis or --get-mismatch-metrics"
    )
    tis_clip_low: float = flag(
        0.0, "lower bound of the weights of --use-tis", ge=0, needs="--use-tis or --get-mismatch-metrics"
    )
    custom_tis_function_path: DottedPath | None = flag(
        None,
        "dotted path of your own importance weights, for --use-tis",
        hook=Contract(
            "fn(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, "
            "**kw)",
            0,
            (
                "args",
                "pg_loss",
                "train_log_probs",
                "rollout_log_probs",
                "loss_masks",
                "total_lengths",
                "response_lengths",
            ),
            caller="trainer",
        ),
        needs="--use-tis or --get-mismatch-metrics",
        silenced_by=("sft_loss",),
    )
    custom_pg_loss_reducer_function_path: DottedPath | None = flag(
        None,
        "dotted path of your own reduction of the policy loss over tokens; default: mean over tokens, then samples",
        hook=Contract(
            "fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss"
            "[, rollout_ids, rollout_mask_sums, rollout_turn_counts])",
            4,
            offered=("rollout_ids", "rollout_mask_sums", "rollout_turn_counts"),
            caller="trainer",
        ),
    )
    pg_loss_reducer: Literal["rollout_mean", "turn_mean", "constant_length"] = flag(
        "rollout_mean",
        "how tokens of the policy loss weigh: alike within a trajectory; alike within each of its samples, which weigh "
        "alike (turn_mean: Flow-GRPO, also for KL and entropy); or divided by --pg-loss-length (Dr. GRPO)",
    )
    pg_loss_length: int | None = flag(
        None, "divisor of --pg-loss-reducer constant_length; default: --rollout-max-response-len", ge=1
    )
    get_mismatch_metrics: bool = flag(
        False,
        "report the metrics of --custom-tis-function-path, which decides whether it changes the loss",
        silenced_by=("sft_loss",),
    )
    mismatch_alarm_threshold: float = flag(
        0.1,
        "warn, once per rollout and after the first push of weights, when log-probs of engine and trainer for the same "
        "tokens differ by more on average; 0: never",
        ge=0,
    )
    mismatch_stop_threshold: float | None = flag(
        None,
        "stop the run, before the step or the first rollout, when they differ by more on average; default: never",
        gt=0,
    )
    use_routing_replay: bool = flag(
        False, "record expert routing in the log-prob pass and replay it in training", critic=False
    )
    use_rollout_routing_replay: bool = flag(
        False, "replay the engine's expert routing in training", decides_generation=True, critic=False
    )
    use_opsm: bool = flag(False, "mask sequences that are too far off policy", silenced_by=("sft_loss",))
    opsm_delta: float = flag(
        1e-4,
        "KL to the old policy above which --use-opsm masks a sequence with negative advantage",
        ge=0,
        needs="--use-opsm",
    )


class Distillation(ArgumentGroup):
    """On-policy distillation."""

    title = "on-policy distillation"

    use_opd: bool = flag(False, "train towards a teacher's log-probs")
    opd_type: Literal["sglang", "megatron"] | None = flag(
        None,
        "where the teacher of --use-opd runs: in an SGLang server (--rm-url) or in the trainer (--opd-teacher-load)",
        needs="--use-opd",
    )
    opd_kl_coef: float = flag(1.0, "weight of the KL to the teacher", needs="--use-opd")
    opd_teacher_load: str | None = flag(None, "checkpoint of the teacher, with --opd-type megatron", path="model")
    opd_teacher_ckpt_step: int | None = flag(
        None, "step of the checkpoint --opd-teacher-load; default: its latest", needs="--use-opd"
    )


LOG_PROB_SERVER = Needs(
    "python -m slime.backends.megatron_utils.server.megatron_server", lambda args: args.log_probs_only
)


class TeacherServer(ArgumentGroup):
    """A server that answers with log-probs of a Megatron model."""

    title = "log-prob server"
    read_by = "run"

    teacher_port: int = flag(
        7999,
        "port of the log-prob server; default: the variable TEACHER_PORT, or 7999",
        gt=0,
        variable="TEACHER_PORT",
        needs=LOG_PROB_SERVER,
    )
    teacher_warmup_port: int = flag(
        7999,
        "port at which the first request is sent to it, if something is in front of it; default: the variable "
        "TEACHER_WARMUP_PORT, or --teacher-port",
        gt=0,
        variable="TEACHER_WARMUP_PORT",
        needs=LOG_PROB_SERVER,
    )
    teacher_warmup_timeout_s: int = flag(
        3000,
        "seconds the first request may take; default: the variable TEACHER_WARMUP_TIMEOUT_S, or 3000",
        gt=0,
        variable="TEACHER_WARMUP_TIMEOUT_S",
        needs=LOG_PROB_SERVER,
    )
    teacher_sample_reduction_chunk_size: int = flag(
        4096, "tokens whose logits are copied at a time to draw from them", gt=0, needs=LOG_PROB_SERVER
    )
    teacher_label_reduction_chunk_size: int = flag(
        4096, "tokens whose logits are copied at a time for labels", gt=0, needs=LOG_PROB_SERVER
    )
    megatron_server_max_length: int = flag(
        0,
        "largest number of tokens of a request, 0 for no limit; default: the variable MEGATRON_SERVER_MAX_LENGTH, or 0",
        ge=0,
        variable="MEGATRON_SERVER_MAX_LENGTH",
        needs=LOG_PROB_SERVER,
    )
    megatron_server_update_timeout_s: float = flag(
        3600.0,
        "seconds an update of weights waits for requests that are being answered; default: the variable "
        "MEGATRON_SERVER_UPDATE_TIMEOUT_S, or 3600",
        gt=0,
        variable="MEGATRON_SERVER_UPDATE_TIMEOUT_S",
        needs=LOG_PROB_SERVER,
    )
    megatron_server_warmup: bool | None = flag(
        None,
        "whether a first request is answered before /healthz says so; default: the variable MEGATRON_SERVER_WARMUP, "
        "or yes",
        variable="MEGATRON_SERVER_WARMUP",
        needs=LOG_PROB_SERVER,
    )


class MultiTokenPrediction(ArgumentGroup):
    """Multi-token prediction heads."""

    title = "multi-token prediction"

    mtp_num_layers: int | None = flag(
        None,
        "layers of the checkpoint that predict tokens further ahead; default: they are not loaded",
        ge=1,
        critic=None,
    )
    mtp_loss_scaling_factor: float = flag(
        0.2, "weight of the loss of --mtp-num-layers, with --enable-mtp-training", ge=0, needs="--enable-mtp-training"
    )
    enable_mtp_training: bool = flag(
        False, "train the layers of --mtp-num-layers, and them alone, on further tokens", critic=False
    )
