"""The distillation term: in the advantages, and with top-k in the loss."""

from __future__ import annotations

import pytest
import torch

from slime.backends.megatron_utils import loss
from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean
from slime.ext.distill.guide import Distillation, add_distillation, choose_teachers
from slime.train_data.device_batch import DeviceBatch
from slime.utils.errors import ConfigError, DataError
from tests.unit.backends.megatron_utils.megatron_case import parse, start_single_process
from tests.unit.backends.megatron_utils.test_loss import MODEL_FLAGS, VOCAB, make_args, make_batch, make_logits, run


@pytest.fixture(scope="module", autouse=True)
def world() -> None:
    start_single_process(parse(*MODEL_FLAGS))


def test_distillation_pulls_towards_the_teacher():
    advantages, reverse_kl = add_distillation(
        [torch.tensor([1.0, 1.0])], [torch.tensor([-1.0, -2.0])], [torch.tensor([-2.0, -1.0])], coef=0.5
    )
    assert [values.tolist() for values in (*advantages, *reverse_kl)] == [[0.5, 1.5], [1.0, -1.0]]


def test_advantages_without_the_guides_of_the_run_are_refused() -> None:
    args = make_args(advantage_terms=("--use-opd: the teacher's pull is in the advantages",))
    with pytest.raises(ConfigError, match=r"--use-opd: .* without guides, which add it: pass \[guide\(args\)"):
        loss.compute_advantages_and_returns(args, {})


def test_each_sample_has_the_columns_of_its_own_teacher():
    answers = {"math": {"teacher_log_probs": [1, 2]}, "code": {"teacher_log_probs": [3, 4]}}
    data = DeviceBatch(teacher_names=["code", "math"])
    choose_teachers(data, answers)
    assert data.teacher_log_probs == [3, 2]
    with pytest.raises(DataError, match="--opd-teachers needs the column teacher_names"):
        choose_teachers(DeviceBatch(), answers)


def test_top_k_distillation_adds_the_divergence_from_the_teachers_tokens() -> None:
    generator = torch.Generator().manual_seed(3)
    batch = make_batch(masks=((1, 1), (1, 0, 1, 1)))
    batch["advantages"] = [torch.zeros(2), torch.zeros(4)]
    sizes, temperature = (2, 4), 0.7
    teacher = torch.randn(6, VOCAB, generator=generator).log_softmax(-1)
    best = teacher.topk(3, dim=-1)
    top = torch.stack([best.indices.float(), best.values], dim=1)
    top[3] = float("nan")  # of the untrained token
    batch["teacher_top"] = list(top.split(sizes))
    logits = torch.randn(1, sum(batch["total_lengths"]) + 3, VOCAB + 3, generator=generator).requires_grad_()
    args = make_args(opd_top_k=3, opd_kl_coef=2.0, rollout_temperature=temperature)
    batch["loss_terms"] = [Distillation(args).loss_term]
    value, metrics = loss.policy_loss_function(
        args, batch, logits, get_sum_of_sample_mean(
            batch["total_lengths"], batch["response_lengths"], batch["loss_masks"], batch["rollout_mask_sums"]
        ),
    )  # fmt: skip
    value.backward()

    again = logits.detach().double().requires_grad_()
    rows = torch.tensor([1, 2, 5, 6, 7, 8])
    student = (again[0, rows, :VOCAB] / temperature).log_softmax(-1).gather(1, best.indices)
    p, q = student.exp(), best.values.double().exp()
    kl = (p * (p / q).log()).sum(-1) + (1 - p.sum(-1)) * ((1 - p.sum(-1)) / (1 - q.sum(-1))).log()
    expected = (kl[0] + kl[1]) / 2 + (kl[2] + kl[4] + kl[5]) / 3
    (2.0 * expected).backward()
    assert float(metrics["opd_loss"]) == pytest.approx(float(expected), rel=1e-5)
    assert float(value) == pytest.approx(2.0 * float(expected), rel=1e-5)
    torch.testing.assert_close(logits.grad.double(), again.grad, atol=1e-6, rtol=1e-4)


def test_top_k_distillation_without_the_teachers_tokens_says_so() -> None:
    batch = make_batch()
    args = make_args(opd_top_k=3, opd_kl_coef=1.0)
    batch |= {"advantages": [torch.zeros(2), torch.zeros(4)], "loss_terms": [Distillation(args).loss_term]}
    with pytest.raises(DataError, match="--opd-top-k needs the teacher's likeliest tokens"):
        run(args, batch, make_logits(batch, [[-1.0, -2.0], [-0.5, -1.5, -2.5, -3.5]]))
