"""Token losses, log-probabilities, entropy and KL against the reference on random ragged batches."""

import pytest
import torch

from slime.algorithms.kl import approx_kl
from slime.algorithms.log_probs import vocab_parallel_log_probs
from slime.algorithms.off_policy import MismatchBounds, icepop, truncated_importance_sampling
from slime.algorithms.policy_losses.cispo import cispo_loss
from slime.algorithms.policy_losses.gspo import sequence_log_ratio, spread_over_tokens
from slime.algorithms.policy_losses.opsm import off_policy_sequence_mask
from slime.algorithms.policy_losses.ppo_clip import ClipConfig, clipped_policy_loss
from slime.algorithms.value_loss import clipped_value_loss
from tests.oracle import reference
from tests.oracle.batches import VOCABULARY, random_examples

SEEDS = range(6)
CLIP = ClipConfig(low=0.2, high=0.28)


def close(actual, expected):
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def drawn(examples, seed):
    """Current log-probabilities near the old ones, for both sides: float32 leaves and their float64 copies."""
    generator = torch.Generator().manual_seed(seed)
    product = [
        (torch.tensor(example.old) + 0.6 * torch.randn(example.response_length, generator=generator)).requires_grad_()
        for example in examples
    ]
    return product, [row.detach().double().requires_grad_() for row in product]


def advantages_of(examples, seed):
    generator = torch.Generator().manual_seed(seed + 100)
    return [torch.randn(example.response_length, generator=generator) for example in examples]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_log_probs_and_entropy(seed, temperature):
    for index, example in enumerate(random_examples(seed, num_rollouts=3)):
        generator = torch.Generator().manual_seed(index)
        logits = 4 * torch.randn(len(example.tokens), VOCABULARY, generator=generator)
        rows = slice(example.prompt_length - 1, len(example.tokens) - 1)
        targets = torch.tensor(example.tokens[example.prompt_length :])
        log_prob, entropy = vocab_parallel_log_probs(
            logits[rows], targets, with_entropy=True, chunk_size=3, temperature=temperature
        )
        close(log_prob, reference.response_log_probs(example, logits, temperature))
        close(entropy, reference.response_entropies(example, logits, temperature))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_kl(seed, kind):
    for example in random_examples(seed):
        actual = approx_kl(torch.tensor(example.old), torch.tensor(example.reference), kind)
        close(actual, reference.kl(reference.f64(example.old), reference.f64(example.reference), kind))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["ppo", "dual", "gspo", "cispo"])
def test_policy_losses_and_their_gradients(seed, name):
    examples = random_examples(seed)
    product, twins = drawn(examples, seed)
    advantages = advantages_of(examples, seed)
    old = [torch.tensor(example.old) for example in examples]
    log_prob_T, old_T, advantage_T = torch.cat(product), torch.cat(old), torch.cat(advantages)
    if name == "gspo":
        masks = [torch.tensor(example.mask) for example in examples]
        ratio_N = sequence_log_ratio(product, old, masks)
        log_ratio_T = spread_over_tokens(ratio_N, [example.response_length for example in examples])
        actual, _ = clipped_policy_loss(log_ratio_T, advantage_T, CLIP)
    elif name == "cispo":
        actual, _ = cispo_loss(log_prob_T - old_T, log_prob_T, advantage_T, CLIP)
    else:
        clip = ClipConfig(low=0.2, high=0.28, dual=1.2 if name == "dual" else None)
        actual, _ = clipped_policy_loss(log_prob_T - old_T, advantage_T, clip)

    expected = []
    for example, twin, advantage in zip(examples, twins, advantages, strict=True):
        if name == "dual":
            ratio = (twin - reference.f64(example.old)).exp()
            expected.append(reference.clipped_surrogate(ratio, advantage.double(), 0.2, 0.28, 1.2))
        else:
            losses = {"ppo": reference.ppo_losses, "gspo": reference.gspo_losses, "cispo": reference.cispo_losses}
            expected.append(losses[name](example, twin, advantage.double(), 0.2, 0.28))
    close(actual, torch.cat(expected))
    actual.sum().backward()
    torch.cat(expected).sum().backward()
    for row, twin in zip(product, twins, strict=True):
        close(row.grad, torch.zeros_like(twin) if twin.grad is None else twin.grad)


@pytest.mark.parametrize("seed", SEEDS)
def test_off_policy_sequences_are_dropped(seed):
    examples = random_examples(seed)
    product, twins = drawn(examples, seed)
    advantages = advantages_of(examples, seed)
    old = [torch.tensor(example.old) for example in examples]
    masks = [torch.tensor(example.mask) for example in examples]
    keep = off_policy_sequence_mask(product, old, masks, advantages, delta=0.1)
    expected = [
        reference.opsm_keeps(example, twin, advantage, 0.1)
        for example, twin, advantage in zip(examples, twins, advantages, strict=True)
    ]
    assert torch.equal(keep.double(), torch.cat(expected))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("drop", [False, True])
def test_mismatch_corrections(seed, drop):
    examples = random_examples(seed)
    old = torch.cat([torch.tensor(example.old) for example in examples])
    rollout = torch.cat([torch.tensor(example.rollout) for example in examples])
    correct = icepop if drop else truncated_importance_sampling
    actual, _ = correct(torch.ones_like(old), old, rollout, MismatchBounds(low=0.5, high=1.8))
    close(actual, torch.cat([reference.mismatch_weights(example, 0.5, 1.8, drop) for example in examples]))


@pytest.mark.parametrize("seed", SEEDS)
def test_value_loss(seed):
    examples = random_examples(seed)
    for index, example in enumerate(examples):
        generator = torch.Generator().manual_seed(index)
        values = torch.randn(example.response_length, generator=generator, dtype=torch.float64)
        returns = torch.randn(example.response_length, generator=generator, dtype=torch.float64)
        actual, _ = clipped_value_loss(values, reference.f64(example.values), returns, clip=0.2)
        close(actual, reference.value_losses(values, example, returns, 0.2))
