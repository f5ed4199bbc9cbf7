"""The data of every cell: ragged samples with holes in their masks, and the reference's loss over them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.matrix.case import FamilyCase, reference_logits

LENGTHS = ((3, 9), (2, 1), (7, 58), (5, 5), (1, 13), (4, 2), (6, 31), (3, 3), (1, 1))
"""Prompt and response tokens of the samples: very long beside very short ones, responses of a single token."""
ROLLOUT_IDS = (0, 1, 2, 3, 4, 5, 6, 7, 7)
"""The last two samples belong to one rollout, which counts once."""
FULLY_MASKED = (1, 5)
GLOBAL_BATCH_SIZE = 8
"""Rollouts of one optimizer step."""


def make_train_data(
    vocab_size: int, seed: int = 0, add_images: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """The columns that a rollout passes to the trainer: masks with holes, two samples without a trained token."""
    generator = random.Random(seed)
    data: dict[str, Any] = {name: [] for name in ("tokens", "response_lengths", "rewards", "loss_masks", "truncated")}
    data["rollout_log_probs"] = []
    for index, (prompt, response) in enumerate(LENGTHS):
        data["tokens"].append([generator.randrange(vocab_size) for _ in range(prompt + response)])
        data["response_lengths"].append(response)
        mask = [int(index not in FULLY_MASKED and generator.random() < 0.8) for _ in range(response)]
        data["loss_masks"].append(mask)
        data["rollout_log_probs"].append([-generator.random() * 5 for _ in range(response)])
        data["rewards"].append(generator.uniform(-1, 1))
        data["truncated"].append(0)
    data["raw_reward"] = list(data["rewards"])
    data["rollout_ids"] = list(ROLLOUT_IDS)
    data["sample_indices"] = list(range(len(LENGTHS)))
    if add_images is not None:
        add_images(data)
    return data


def samples_of(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Per sample: ``tokens`` [L], ``mask`` [response] and ``weight``, one over the trained tokens of its rollout and
    over the rollouts of the step."""
    trained: dict[int, int] = {}
    for rollout, mask in zip(data["rollout_ids"], data["loss_masks"], strict=True):
        trained[rollout] = trained.get(rollout, 0) + sum(mask)
    images = data.get("multimodal_train_inputs") or [None] * len(data["tokens"])
    return [
        {
            "tokens": torch.tensor(tokens),
            "mask": torch.tensor(mask, dtype=torch.float32),
            "weight": 1.0 / max(trained[rollout], 1) / len(trained),
            "images": image,
        }
        for tokens, mask, rollout, image in zip(
            data["tokens"], data["loss_masks"], data["rollout_ids"], images, strict=True
        )
    ]


def reference_log_probs(model: torch.nn.Module, samples: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Log-prob of every response token [response], sample by sample."""
    result = []
    for sample in samples:
        tokens, num_response = sample["tokens"], len(sample["mask"])
        log_probs = reference_logits(model, tokens, sample["images"])
        log_probs = log_probs[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        result.append(log_probs[-num_response:])
    return result


def reference_loss(case: FamilyCase, model: torch.nn.Module, data: Mapping[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """Supervised fine-tuning: minus the mean log-prob of each rollout's trained tokens, averaged over the rollouts.

    Returns the loss and its log-probs.
    """
    samples = samples_of(data)
    log_probs = reference_log_probs(model, samples)
    loss = torch.zeros(())
    for sample, log_prob in zip(samples, log_probs, strict=True):
        loss = loss - sample["weight"] * (log_prob * sample["mask"]).sum()
    if case.extra_loss is not None:
        loss = loss + case.extra_loss(model, samples)
    return loss, [log_prob.detach() for log_prob in log_probs]
