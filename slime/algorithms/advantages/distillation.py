"""On-policy distillation: a reverse-KL pull towards a teacher, added to the advantages of any estimator."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def add_distillation(
    advantages_N: Sequence[Tensor],
    student_log_prob_N: Sequence[Tensor],
    teacher_log_prob_N: Sequence[Tensor],
    *,
    coef: float,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return ``A - coef * (log pi_student - log pi_teacher)`` on each token.

    Args:
        advantages_N: [R] each.
        student_log_prob_N: [R] each, under the policy that sampled; constant.
        teacher_log_prob_N: [R] each, of the same tokens.
        coef: ``--opd-kl-coef``.

    Returns:
        ``(advantages_N, reverse_kl_N)``, the second being the difference itself, in nats, for the log.

    Source: Thinking Machines Lab, "On-policy distillation", 2025; Agarwal et al., arXiv:2306.13649.
    """
    reverse_kl_N = [
        student_R.float() - teacher_R.to(student_R.device).float()
        for student_R, teacher_R in zip(student_log_prob_N, teacher_log_prob_N, strict=True)
    ]
    advantages = [
        advantages_R - coef * reverse_kl_R
        for advantages_R, reverse_kl_R in zip(advantages_N, reverse_kl_N, strict=True)
    ]
    return advantages, reverse_kl_N
