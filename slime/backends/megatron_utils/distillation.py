"""On-policy distillation: the teacher's share of the advantages."""

from __future__ import annotations

from argparse import Namespace

from slime.algorithms.opd import distil
from slime.backends.megatron_utils.data import RolloutData


def add_distillation(args: Namespace, data: RolloutData) -> None:
    """With ``--use-opd``: take ``opd_kl_coef`` times the reverse KL off ``advantages``, and set ``opd_reverse_kl``.

    The student's log-probs are those of the old policy. Returns of a value function stay as they are: it does not know
    the teacher. Raises ValueError when a column is missing.
    """
    if not args.use_opd:
        return
    student = "rollout_log_probs" if args.use_rollout_logprobs else "log_probs"
    if data.get("teacher_log_probs") is None:
        raise ValueError(
            f"--use-opd --opd-type {args.opd_type}: the samples have no teacher_log_probs. "
            "slime.rollout.on_policy_distillation sets them (--custom-rm-path ...reward_func, "
            "--custom-reward-post-process-path ...post_process_rewards), or set Sample.teacher_log_probs, one number "
            "per response token, in a function of yours; a converter of yours must pass the column on"
        )
    if data.get(student) is None:
        raise ValueError(f"--use-opd needs the student's {student}, which the samples and passes do not have")
    data["advantages"], data["opd_reverse_kl"] = distil(
        data["advantages"], data[student], data["teacher_log_probs"], args.opd_kl_coef
    )
