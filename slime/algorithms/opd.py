"""On-policy distillation: a penalty for what the teacher finds unlikely, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def distil(
    advantages: Sequence[Tensor],
    student_log_probs: Sequence[Tensor],
    teacher_log_probs: Sequence[Tensor],
    kl_coef: float,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return (advantages, reverse KL), one tensor [n_i] per sample: ``A_t - kl_coef * k_t``, ``k_t`` itself.

    ``k_t = log p_student(y_t) - log p_teacher(y_t)`` is, for tokens that the student sampled, the unbiased estimate of
    KL(student, teacher) at position t; as part of the advantage it is a reward per token and carries no gradient
    (Thinking Machines Lab, "On-Policy Distillation", 2025; the objective is that of MiniLLM, arXiv:2306.08543). A term
    of the tokens that follow is not counted (discount 0), as there.

    Raises ValueError, with the sample's position, for lengths that disagree.
    """
    distilled, reverse_kl = [], []
    rows = zip(advantages, student_log_probs, teacher_log_probs, strict=True)
    for i, (advantage, student, teacher) in enumerate(rows):
        if not advantage.shape == student.shape == teacher.shape:
            raise ValueError(
                f"sample {i}: {tuple(advantage.shape)} advantages, {tuple(student.shape)} log-probs of the student and "
                f"{tuple(teacher.shape)} of the teacher; expected one of each per response token"
            )
        with torch.no_grad():
            kl = student - teacher.to(student)
            distilled.append(advantage - kl_coef * kl)
        reverse_kl.append(kl)
    return distilled, reverse_kl
