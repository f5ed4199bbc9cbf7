"""Losses of a packed batch by hand, on one rank."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

from slime.algorithms.advantages import Estimator, group_relative_advantages
from slime.algorithms.policy_losses import ClipConfig, PolicyLoss, PolicyLossInputs, TokenLosses
from slime.backends.megatron_utils import loss
from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean
from slime.utils.errors import DataError
from tests.flag_values import args_with
from tests.unit.backends.megatron_utils.megatron_case import parse, start_single_process

VOCAB = 5
MODEL_FLAGS = (
    "--num-layers 1 --hidden-size 8 --ffn-hidden-size 8 --num-attention-heads 2 --vocab-size 5 "
    "--make-vocab-size-divisible-by 8 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--use-rotary-position-embeddings --fp32"
).split()


@pytest.fixture(scope="module", autouse=True)
def world() -> None:
    start_single_process(parse(*MODEL_FLAGS))


def make_args(**overrides: Any) -> Namespace:
    """The flags that a loss reads; plain GRPO unless overridden."""
    plain = {"vocab_size": VOCAB, "allgather_cp": False, "eps_clip_high": 0.28, "use_routing_replay": False}
    return args_with(**plain | overrides)


def make_batch(masks: tuple[tuple[int, ...], ...] = ((1, 1), (1, 1, 1, 1)), **columns: Any) -> dict[str, Any]:
    """Samples with a prompt of two tokens; response token ids are 1, 2, 1, 2 ..."""
    tokens = [torch.tensor([0, 0, *(1 + i % 2 for i in range(len(mask)))]) for mask in masks]
    batch: dict[str, Any] = {
        "unconcat_tokens": tokens,
        "total_lengths": [len(sequence) for sequence in tokens],
        "response_lengths": [len(mask) for mask in masks],
        "loss_masks": [torch.tensor(mask) for mask in masks],
        "rollout_mask_sums": torch.tensor([float(sum(mask)) for mask in masks]),
    }
    return batch | {name: [torch.tensor(values) for values in value] for name, value in columns.items()}


def make_logits(batch: dict[str, Any], log_probs: list[list[float]], *, padding: int = 3) -> torch.Tensor:
    """[1, T, 8] logits that give each response token the requested log-prob; three columns are padding."""
    rows = sum(batch["total_lengths"]) + padding
    logits = torch.zeros(rows, VOCAB + 3)
    start = 0
    for sequence, wanted in zip(batch["unconcat_tokens"], log_probs, strict=True):
        first = start + len(sequence) - len(wanted)
        for offset, log_prob in enumerate(wanted):
            others = ((1 - torch.tensor(log_prob).exp()) / (VOCAB - 1)).log()
            row = torch.full((VOCAB,), float(others))
            row[sequence[len(sequence) - len(wanted) + offset]] = log_prob
            logits[first - 1 + offset, :VOCAB] = row
        start += len(sequence)
    return logits[None].requires_grad_()


def run(args: Namespace, batch: dict[str, Any], logits: torch.Tensor, loss_type: str = "policy_loss") -> Any:
    reducer = get_sum_of_sample_mean(
        batch["total_lengths"], batch["response_lengths"], batch["loss_masks"], batch["rollout_mask_sums"],
        args.calculate_per_token_loss,
    )  # fmt: skip
    value, metrics = loss.LOSSES[loss_type](args, batch, logits, reducer)
    return float(value), {name: float(metric) for name, metric in metrics.items()}


def test_log_probs_are_those_of_the_response_tokens_without_the_vocabulary_padding() -> None:
    batch = make_batch()
    logits = make_logits(batch, [[-1.0, -2.0], [-0.5, -1.5, -2.5, -3.5]])
    _, result = loss.get_log_probs_and_entropy(
        logits, args=make_args(), with_entropy=True,
        **{key: batch[key] for key in ("unconcat_tokens", "total_lengths", "response_lengths")},
    )  # fmt: skip
    assert [values.tolist() for values in result["log_probs"]] == [
        pytest.approx([-1.0, -2.0]),
        pytest.approx([-0.5, -1.5, -2.5, -3.5]),
    ]
    p = torch.tensor([0.3679, *[0.6321 / 4] * 4])
    assert float(result["entropy"][0][0]) == pytest.approx(float(-(p * p.log()).sum()), rel=1e-3)


def test_the_temperature_divides_the_logits() -> None:
    batch = make_batch(masks=((1,),))
    logits = make_logits(batch, [[-1.0]])
    _, result = loss.get_log_probs_and_entropy(
        logits, args=make_args(rollout_temperature=0.5),
        **{key: batch[key] for key in ("unconcat_tokens", "total_lengths", "response_lengths")},
    )  # fmt: skip
    expected = (logits.detach()[0, 1, :VOCAB] / 0.5).log_softmax(-1)[1]
    assert float(result["log_probs"][0]) == pytest.approx(float(expected))


def test_outside_the_recorded_nucleus_a_token_has_no_probability() -> None:
    batch = make_batch(masks=((1, 1),))
    logits = make_logits(batch, [[-1.0, -1.0]])
    _, result = loss.get_log_probs_and_entropy(
        logits, args=make_args(),
        top_p_token_ids=[torch.tensor([3], dtype=torch.int32)],
        top_p_token_offsets=[torch.tensor([0, 1, 1], dtype=torch.int32)],
        **{key: batch[key] for key in ("unconcat_tokens", "total_lengths", "response_lengths")},
    )  # fmt: skip
    # Token 1 was sampled from {1, 3}: p = 0.3679 / (0.3679 + 0.158). The second token has no recorded nucleus.
    expected = torch.tensor(0.36788 / (0.36788 + 0.63212 / 4)).log()
    assert result["log_probs"][0].tolist() == pytest.approx([float(expected), -1.0], rel=1e-4)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "expected"),
    [(1.5, 1.0, None, -1.28), (0.5, 1.0, None, -0.5), (0.5, -1.0, None, 0.8), (1.5, -1.0, None, 1.5), (5, -1.0, 3, 3)],
)
def test_policy_loss_clips_the_ratio(ratio: float, advantage: float, dual: float | None, expected: float) -> None:
    old = -2.0
    batch = make_batch(masks=((1,),), advantages=[[advantage]], log_probs=[[old]])
    logits = make_logits(batch, [[old + float(torch.tensor(float(ratio)).log())]])
    value, metrics = run(make_args(eps_clip_c=dual), batch, logits)
    assert value == pytest.approx(expected, rel=1e-5)
    assert metrics["ppo_kl"] == pytest.approx(-float(torch.tensor(float(ratio)).log()), rel=1e-4)


def test_without_old_log_probs_the_ratio_is_one_and_the_gradient_is_reinforce() -> None:
    batch = make_batch(masks=((1,),), advantages=[[0.7]])
    logits = make_logits(batch, [[-1.0]])
    args = make_args()
    reducer = get_sum_of_sample_mean([3], [1], batch["loss_masks"], batch["rollout_mask_sums"])
    value, _ = loss.policy_loss_function(args, batch, logits, reducer)
    value.backward()
    p = torch.tensor([0.63212 / 4, 0.36788, *[0.63212 / 4] * 3])
    expected = -0.7 * (torch.tensor([0.0, 1, 0, 0, 0]) - p)
    assert torch.allclose(logits.grad[0, 1, :VOCAB], expected, atol=1e-4)
    assert not logits.grad[0, 1, VOCAB:].any(), "padding columns get no gradient"
    assert not logits.grad[0, 0].any() and not logits.grad[0, 2:].any(), "prompt and padding rows get none"


def test_kl_loss_and_entropy_are_added_with_their_weights() -> None:
    batch = make_batch(masks=((1,),), advantages=[[0.0]], ref_log_probs=[[-1.1]])
    args = make_args(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k3", entropy_coef=0.1)
    value, metrics = run(args, batch, make_logits(batch, [[-1.0]]))
    assert metrics["kl_loss"] == pytest.approx(0.0048374, rel=1e-4)
    assert value == pytest.approx(0.5 * metrics["kl_loss"] - 0.1 * metrics["entropy_loss"])


def test_cispo_weighs_the_log_prob_by_a_constant() -> None:
    batch = make_batch(masks=((1,),), advantages=[[2.0]], log_probs=[[-2.0]])
    value, _ = run(make_args(advantage_estimator="cispo"), batch, make_logits(batch, [[-1.0]]))
    assert value == pytest.approx(-1.28 * 2.0 * -1.0, rel=1e-5)


def reinforce(inputs: PolicyLossInputs, clip: ClipConfig) -> TokenLosses:
    """A surrogate from outside slime."""
    loss_T = -inputs.advantage_T * torch.cat(list(inputs.log_prob_N))
    return TokenLosses(loss_T, torch.zeros_like(loss_T), inputs.log_ratio_T)


plain_reinforce = Estimator(compute=group_relative_advantages, policy_loss=PolicyLoss(compute=reinforce))


def test_an_estimator_may_bring_its_own_surrogate() -> None:
    batch = make_batch(masks=((1, 1),), advantages=[[2.0, -1.0]], log_probs=[[-9.0, -9.0]])
    args = make_args(advantage_estimator=f"{__name__}.plain_reinforce")
    value, metrics = run(args, batch, make_logits(batch, [[-1.0, -3.0]]))
    assert value == pytest.approx((2.0 * 1.0 - 1.0 * 3.0) / 2, rel=1e-5)
    assert metrics["ppo_kl"] == pytest.approx(-7.0, rel=1e-5)


def test_with_the_engines_log_probs_the_mismatch_is_that_of_the_trainers() -> None:
    batch = make_batch(masks=((1,),), advantages=[[1.0]], log_probs=[[-1.0]], rollout_log_probs=[[-1.5]])
    args = make_args(use_rollout_logprobs=True, get_mismatch_metrics=True)
    value, metrics = run(args, batch, make_logits(batch, [[-1.5]]))
    assert value == pytest.approx(-1.0, rel=1e-5), "the ratio is to the engine's log-prob"
    assert metrics["ois"] == pytest.approx(float(torch.tensor(0.5).exp()), rel=1e-5)


def test_a_column_of_the_wrong_length_is_refused() -> None:
    batch = make_batch(masks=((1, 1),), advantages=[[1.0]])
    with pytest.raises(DataError, match=r"a column has \[1\] entries for \[2\] response tokens"):
        run(make_args(), batch, make_logits(batch, [[-1.0, -1.0]]))


def of_the_weights_in_training(args, *, pg_loss, train_log_probs, loss_masks, cur_log_probs, **_):
    """A correction that asks for the log-probs of the weights in training."""
    return pg_loss * 0 + torch.cat(cur_log_probs), loss_masks, {"before": torch.cat(train_log_probs)}


def of_the_weights_before(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths,
                          response_lengths):  # fmt: skip
    """A correction with the old signature, which cannot ask for them."""
    return pg_loss, loss_masks, {}


def test_a_correction_gets_the_log_probs_of_the_weights_in_training_if_it_takes_them() -> None:
    batch = make_batch(masks=((1, 0),), advantages=[[1.0, 1.0]], log_probs=[[-1.0, -1.0]])
    batch["rollout_log_probs"] = [torch.tensor([-1.5, -1.5])]
    logits = make_logits(batch, [[-2.0, -3.0]])
    args = make_args(use_tis=True, custom_tis_function_path=f"{__name__}.of_the_weights_in_training")
    value, metrics = run(args, batch, logits)
    assert (value, metrics["before"]) == (pytest.approx(-2.0, rel=1e-5), -1.0)
    args.custom_tis_function_path = f"{__name__}.of_the_weights_before"
    assert run(args, batch, logits)[0] == pytest.approx(-torch.tensor(-1.0).exp().item(), rel=1e-5)


def half_of_log_probs(args: Namespace, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Any) -> Any:
    """A user's loss."""
    assert logits.dtype is torch.float32
    value = sum_of_sample_mean(torch.full((sum(batch["response_lengths"]),), 0.5)) + 0 * logits.sum()
    return value, {"mine": value, "plain": 0.25}


def test_a_custom_loss_gets_fp32_logits_and_the_reducer() -> None:
    args = make_args(custom_loss_function_path=f"{__name__}.half_of_log_probs")
    batch = make_batch()
    value, metrics = run(args, batch, make_logits(batch, [[-1.0] * 2, [-1.0] * 4]).bfloat16(), "custom_loss")
    assert value == 1.0
    assert metrics == {"loss": 1.0, "mine": 1.0, "plain": 0.25}


def test_missing_reference_log_probs_are_an_error_that_names_the_flag() -> None:
    batch = make_batch(masks=((1,),), advantages=[[1.0]])
    with pytest.raises(DataError, match="--use-kl-loss needs log-probs"):
        run(make_args(use_kl_loss=True), batch, make_logits(batch, [[-1.0]]))
