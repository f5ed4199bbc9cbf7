"""On-policy distillation in the trainer: a pull towards a teacher, in the advantages or (top-k) in the loss.

The column ``teacher_top`` has [R, 2, K] float32 numbers for each sample: the ids of the teacher's K likeliest tokens
at each response token (whole numbers, exact below 2**24) and their log-probs.

Shapes: R = response tokens, of a sample or of a micro-batch; K = ``--opd-top-k``; T, V as in ``top_k``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.algorithms.log_probs import CHUNK_BYTES, logits_of
from slime.backends.megatron_utils.guide import Guide, Passes
from slime.backends.megatron_utils.log_probs import (
    get_log_probs_and_entropy,
    predicted_tokens,
    response_rows,
    vocab_group,
)
from slime.ext.distill.flags import TeacherConfig, teacher_tag
from slime.ext.distill.top_k import reverse_kl_on_top, top_logits
from slime.train_data.device_batch import DeviceBatch
from slime.utils.errors import DataError


class Distillation(Guide):
    """The teachers of a run, inside the trainer or behind addresses."""

    token_columns = ("opd_reverse_kl",)

    def __init__(self, args: Namespace) -> None:
        super().__init__(args)
        self.loss_term = None if args.opd_top_k is None else self._divergence

    def read(self, passes: Passes, data: DeviceBatch) -> None:
        """Add ``teacher_log_probs``, and ``teacher_top`` with ``--opd-top-k``, where teachers are in the trainer."""
        read = get_log_probs_and_entropy if self.args.opd_top_k is None else get_log_probs_and_top
        teachers = TeacherConfig.of(self.args).in_trainer
        answers = {name: passes(teacher_tag(name), read, "teacher_") for name in teachers}
        if len(answers) > 1:
            choose_teachers(data, answers)
        else:
            data.update(*answers.values())

    def pull(self, data: DeviceBatch, log_probs: Sequence[Tensor] | None) -> None:
        """Pull the advantages towards the teacher, and set ``opd_reverse_kl``.

        Raises:
            DataError: there are no log-probs of student or teacher.
        """
        teacher = data.teacher_log_probs
        if log_probs is None or teacher is None:
            raise DataError(
                f"--use-opd needs the log-probs of {'the student' if log_probs is None else 'the teacher'}; check "
                "--opd-type, --opd-teacher-load and the reward function that queries the teacher"
            )
        coef = self.args.opd_kl_coef if self.loss_term is None else 0.0  # top-k is a term of the loss
        data.advantages, data["opd_reverse_kl"] = add_distillation(data.advantages, log_probs, teacher, coef=coef)

    def _divergence(
        self, batch: Mapping[str, Any], logits: Tensor, log_probs: Sequence[Tensor]
    ) -> tuple[str, float, list[Tensor]]:
        args = self.args
        settings = {"temperature": args.rollout_temperature, "allgather_cp": args.allgather_cp}
        return "opd_loss", args.opd_kl_coef, top_k_divergence(batch, logits, log_probs, **settings)


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


def choose_teachers(data: DeviceBatch, answers: Mapping[str, Mapping[str, Any]]) -> None:
    """Set the teachers' columns: each sample gets the entry of the teacher that ``teacher_names`` of the data names.

    The rollout manager has checked the names (``args.named_columns``).

    Args:
        answers: teacher -> column -> an entry for each sample; without columns on all but the last pipeline stage.

    Raises:
        DataError: the data does not say which teacher is whose.
    """
    names = data.get("teacher_names")
    if names is None:
        raise DataError(
            "--opd-teachers needs the column teacher_names, the name of each sample's teacher; a converter given by "
            "--custom-convert-samples-to-train-data-path must make it"
        )
    for column in next(iter(answers.values())):
        data[column] = [answers[name][column][position] for position, name in enumerate(names)]


def get_log_probs_and_top(
    logits: Tensor, *, args: Namespace, rows_per_chunk: int | None = None, **columns: Any
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Compute what ``get_log_probs_and_entropy`` does, and ``top``: the teacher's column of each sample."""
    nothing, result = get_log_probs_and_entropy(logits, args=args, **columns)
    lengths = columns["total_lengths"], columns["response_lengths"]
    rows_R, positions_N = response_rows(logits, *lengths, allgather_cp=args.allgather_cp)
    target_R = predicted_tokens(columns["unconcat_tokens"], positions_N)
    logits_TV = logits.squeeze(0)
    ids_RK, value_RK = top_logits(
        logits_TV,
        rows_R,
        args.opd_top_k,
        tp_group=vocab_group(),
        vocab_size=args.vocab_size,
        rows_per_chunk=rows_per_chunk or max(CHUNK_BYTES // (4 * logits_TV.shape[-1]), 1),
    )
    log_normaliser_R1 = _log_normaliser(
        logits_TV, rows_R, target_R, torch.cat(result["log_probs"]), args.rollout_temperature
    )
    top_R2K = torch.stack([ids_RK.float(), value_RK / args.rollout_temperature - log_normaliser_R1], dim=1)
    result["top"] = list(top_R2K.split([len(log_prob) for log_prob in result["log_probs"]]))
    return nothing, result


def top_k_divergence(
    batch: Mapping[str, Any], logits: Tensor, log_probs: Sequence[Tensor], *, temperature: float, allgather_cp: bool
) -> list[Tensor]:
    """Return the reverse KL from the teacher's top tokens at each response token, [r] for each sample.

    Args:
        log_probs: [r] of the response tokens, of the same logits and with their gradient.

    Raises:
        DataError: there is no ``teacher_top``.
    """
    if batch.get("teacher_top") is None:
        raise DataError(
            "--opd-top-k needs the teacher's likeliest tokens, and the samples have none. They come from --opd-type "
            "megatron, or from slime.rollout.on_policy_distillation.reward_func and post_process_rewards."
        )
    logits_TV = logits.squeeze(0)
    lengths = batch["total_lengths"], batch["response_lengths"]
    rows_R, positions_N = response_rows(logits, *lengths, allgather_cp=allgather_cp)
    target_R = predicted_tokens(batch["unconcat_tokens"], positions_N)
    # What is not trained may hold anything; it is taken out of the loss later, and must not reach the gradient.
    top_R2K = torch.cat(list(batch["teacher_top"])).nan_to_num(0.0)
    ids_RK, teacher_RK = top_R2K[:, 0].long(), top_R2K[:, 1]
    log_normaliser_R1 = _log_normaliser(logits_TV, rows_R, target_R, torch.cat(list(log_probs)), temperature)
    student_RK = logits_of(logits_TV, rows_R, ids_RK, tp_group=vocab_group()) / temperature
    divergence_R = reverse_kl_on_top(student_RK - log_normaliser_R1, teacher_RK)
    return list(divergence_R.split([len(log_prob) for log_prob in log_probs]))


def _log_normaliser(
    logits_TV: Tensor, rows_R: Tensor, target_R: Tensor, log_prob_R: Tensor, temperature: float
) -> Tensor:
    """Return [R, 1] logsumexp of the rows: the target's logit less its log-prob, so no second pass over the logits."""
    target_logit_R1 = logits_of(logits_TV, rows_R, target_R[:, None], tp_group=vocab_group())
    return target_logit_R1 / temperature - log_prob_R[:, None]
