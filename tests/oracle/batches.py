"""Random ragged batches for the comparison with the reference, and a tiny differentiable policy."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from slime.utils.types import Sample
from tests.oracle.reference import Example

VOCABULARY = 11


def random_examples(seed: int, num_rollouts: int = 8) -> list[Example]:
    """Rollouts of one to three samples each, including empty and one-token responses and fully masked samples."""
    rng = random.Random(seed)
    examples = []
    for rollout_id in range(num_rollouts):
        reward = rng.choice([-1.0, -0.25, 0.5, 1.0])
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            response = rng.choice([0, 1, 1, 2, 3, rng.randint(4, 17), rng.randint(18, 40)])
            mask = rng.choice([[1] * response, [0] * response, [rng.randint(0, 1) for _ in range(response)]])
            old = [rng.uniform(-4, -1) for _ in range(response)]
            examples.append(
                Example(
                    tokens=[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 9) + response)],
                    response_length=response,
                    mask=mask,
                    rollout_id=rollout_id,
                    reward=reward,
                    old=old,
                    rollout=[value + rng.uniform(-0.9, 0.9) for value in old],
                    reference=[value + rng.uniform(-0.5, 0.5) for value in old],
                    values=[rng.uniform(-1, 1) for _ in range(response)],
                    nucleus=[rng.sample(range(VOCABULARY), rng.choice([0, 1, 3, 6])) for _ in range(response)],
                )
            )
    return examples


def as_samples(examples: list[Example]) -> list[Sample]:
    """slime's samples with the same content."""
    return [
        Sample(
            index=index,
            tokens=list(example.tokens),
            response_length=example.response_length,
            loss_mask=list(example.mask),
            rollout_id=example.rollout_id,
            rollout_log_probs=list(example.rollout),
            reward=example.reward,
            rollout_top_p_token_ids=[token for kept in example.nucleus for token in kept],
            rollout_top_p_token_offsets=[
                sum(map(len, example.nucleus[:n])) for n in range(example.response_length + 1)
            ],
        )
        for index, example in enumerate(examples)
    ]


def bigram_policy(seed: int) -> Tensor:
    """[V, V] logits of the next token for each token: the simplest policy whose gradient distinguishes tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)
