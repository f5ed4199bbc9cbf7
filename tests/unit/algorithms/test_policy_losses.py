"""PPO clip, GSPO, CISPO, OPSM: values by hand, gradients, refusals."""

import math
from argparse import Namespace

import pytest
import torch

from slime.algorithms.policy_losses.cispo import cispo_loss
from slime.algorithms.policy_losses.gspo import sequence_log_ratio, spread_over_tokens
from slime.algorithms.policy_losses.opsm import off_policy_sequence_mask
from slime.algorithms.policy_losses.ppo_clip import ClipConfig, clipped_policy_loss
from slime.utils.errors import ConfigError
from slime.utils.ppo_utils import compute_opsm_mask


def log_ratio(ratio):
    return torch.tensor([math.log(ratio)], dtype=torch.float64)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "loss", "is_clipped", "why"),
    [
        (1.5, 1.0, None, -1.28, True, "gain capped at 1 + high"),
        (0.5, 1.0, None, -0.5, False, "below the floor a gain is not capped"),
        (0.5, -1.0, None, 0.8, True, "a shrinking bad token is capped at 1 - low"),
        (1.5, -1.0, None, 1.5, False, "a growing bad token is never capped"),
        (5.0, -1.0, 3.0, 3.0, False, "unless dual clip caps it at 3 * |A|"),
        (5.0, 1.0, 3.0, -1.28, True, "dual clip leaves gains alone"),
    ],
)
def test_loss_matches_hand_computed_value(ratio, advantage, dual, loss, is_clipped, why):
    clip = ClipConfig(low=0.2, high=0.28, dual=dual)
    value, clipped = clipped_policy_loss(log_ratio(ratio), torch.tensor([advantage]), clip)
    assert value.item() == pytest.approx(loss), why
    assert bool(clipped.item()) is is_clipped


def test_on_policy_gradient_is_reinforce():
    ratio = torch.zeros(3, requires_grad=True)
    advantage = torch.tensor([2.0, -1.0, 0.0])
    clipped_policy_loss(ratio, advantage, ClipConfig())[0].sum().backward()
    assert torch.equal(ratio.grad, -advantage)


def test_dual_clip_at_or_below_one_is_refused():
    with pytest.raises(ConfigError, match="--eps-clip-c is 1.0"):
        ClipConfig(dual=1.0)


def test_sequence_ratio_is_the_mean_over_trained_tokens():
    new = [torch.tensor([-1.0, -2.0, -9.0], requires_grad=True), torch.tensor([-1.0])]
    old = [torch.tensor([-2.0, -4.0, -1.0]), torch.tensor([-5.0])]
    mask = [torch.tensor([1, 1, 0]), torch.tensor([0])]
    ratios = sequence_log_ratio(new, old, mask)
    assert ratios.tolist() == [1.5, 0.0]
    ratios.sum().backward()
    assert new[0].grad.tolist() == [0.5, 0.5, 0.0]
    assert spread_over_tokens(ratios, [3, 0]).tolist() == [1.5, 1.5, 1.5]


@pytest.mark.parametrize(("ratio", "weight", "is_clipped"), [(1.5, 1.28, True), (0.5, 0.8, True), (1.1, 1.1, False)])
def test_cispo_weighs_the_log_prob_by_a_constant(ratio, weight, is_clipped):
    log_prob = torch.tensor([-0.7], dtype=torch.float64, requires_grad=True)
    old = log_prob.detach() - math.log(ratio)
    loss, clipped = cispo_loss(log_prob - old, log_prob, torch.tensor([-2.0]), ClipConfig(low=0.2, high=0.28))
    loss.sum().backward()
    assert loss.item() == pytest.approx(-weight * -2.0 * -0.7)
    assert log_prob.grad.item() == pytest.approx(-weight * -2.0)
    assert bool(clipped.item()) is is_clipped


def test_punished_sequences_that_drifted_are_dropped():
    old = [torch.zeros(2), torch.zeros(2), torch.zeros(2), torch.zeros(1)]
    new = [torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 1.0]), torch.tensor([-9.0])]
    mask = [torch.tensor([1, 1]), torch.tensor([1, 0]), torch.tensor([1, 1]), torch.tensor([0])]
    advantage = [torch.tensor([-1.0, 1.0]), torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0]), torch.ones(1)]
    keep = off_policy_sequence_mask(new, old, mask, advantage, delta=0.5)
    # first: one of two tokens has A < 0; second: both, one of them trained; third: moved towards; fourth: untrained
    assert keep.tolist() == [0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    # the old path counts too: half of the first, the only trained token of the second
    assert compute_opsm_mask(Namespace(opsm_delta=0.5), new, old, advantage, mask)[1].item() == 0.5 + 1.0
