"""Forward-only passes over a rank's rollout: log-probs, entropies and values, in the order of the samples;
and the decision whether the old log-probs take a pass of their own.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from slime.algorithms.advantages import get_estimator
from slime.backends.megatron_utils.cp_utils import packing_of
from slime.backends.megatron_utils.data import DataIterator, forward_arguments, get_batch
from slime.backends.megatron_utils.log_probs import reader_columns
from slime.backends.megatron_utils.loss import wants_mismatch
from slime.backends.megatron_utils.pipeline import run_microbatches
from slime.utils.misc import call_hook

_KEYS = ("multimodal_train_inputs", "host_tokens")
_TOP_P_KEYS = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets")

Reader = Callable[..., tuple[Tensor, dict[str, list[Tensor]]]]
"""``get_log_probs_and_entropy`` or ``get_values``: logits to per-sample tensors."""


def run_model(args: Namespace, model: torch.nn.Module, batch: dict[str, Any]) -> Tensor:
    """Compute the logits of a packed batch, in the model's own precision: the softmax is computed in fp32 anyway."""
    arguments = forward_arguments(args, batch)
    inner: Any = model
    while inner is not None and not isinstance(inner, Float16Module):
        inner = getattr(inner, "module", None)
    if inner is not None:
        arguments["fp32_output"] = False
    return model(**arguments)


@torch.no_grad()
def forward_only(
    read: Reader,
    args: Namespace,
    model: Sequence[torch.nn.Module],
    data_iterator: Sequence[DataIterator],
    num_microbatches: Sequence[int],
    store_prefix: str = "",
) -> dict[str, list[Tensor]]:
    """Run the model over all micro-batches of all steps and read something off its logits.

    Args:
        model: this rank's chunks; in evaluation mode for the pass.
        data_iterator: one for each chunk; restarted.
        store_prefix: put before the names of what was read (``"ref_"``).

    Returns:
        ``{prefix + name: [tensor of each sample]}`` on the last pipeline stage, nothing on the others.
    """
    if path := args.custom_megatron_before_log_prob_hook_path:
        call_hook("--custom-megatron-before-log-prob-hook-path", path, args, list(model), store_prefix)
    was_training = [chunk.training for chunk in model]
    for iterator in data_iterator:
        iterator.reset()
    for chunk in model:
        chunk.eval()
    packing = packing_of(args)
    keys = [*_KEYS, *(_TOP_P_KEYS if args.rollout_top_p != 1.0 else ())]

    def step(iterator: DataIterator, chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        batch = get_batch(iterator, keys, packing)
        logits = run_model(args, chunk, batch)
        return logits, partial(read, args=args, with_entropy=args.use_rollout_entropy, **reader_columns(batch))

    outputs: list[dict[str, list[Tensor]]] = []
    for count in num_microbatches:
        outputs += run_microbatches(args, step, model, data_iterator, count, forward_only=True)
    for chunk, training in zip(model, was_training, strict=True):
        chunk.train(training)
    if not mpu.is_pipeline_last_stage():
        return {}
    return _in_sample_order(outputs, data_iterator[0], store_prefix)


def _in_sample_order(
    outputs: list[dict[str, list[Tensor]]], iterator: DataIterator, prefix: str
) -> dict[str, list[Tensor]]:
    order = [index for indices in iterator.micro_batch_indices for index in indices]
    result: dict[str, list[Tensor]] = {}
    for name in outputs[0]:
        flat = [tensor for output in outputs for tensor in output[name]]
        assert len(flat) == len(order), (name, len(flat), len(order))
        by_position = dict(zip(order, flat, strict=True))
        result[prefix + name] = [by_position[position] for position in range(len(order))]
    return result


def needs_old_log_probs(args: Namespace, num_steps: int) -> bool:
    """Return True when the first forward pass of ``num_steps`` steps gives the old log-probs too late, or others.

    With the engine's log-probs as the old ones (``--use-rollout-logprobs``) only a comparison with the trainer's needs
    them.  Otherwise the pass is skipped when the forward pass of the only optimizer step gives the same numbers and
    nothing reads them before that step.
    """
    if args.use_rollout_logprobs:
        return wants_mismatch(args)
    return next(readers_of_old_log_probs(args, num_steps), None) is not None


def readers_of_old_log_probs(args: Namespace, num_steps: int) -> Iterator[str]:
    """Yield, in words, each reason for a forward pass of its own."""
    estimator = get_estimator(args.advantage_estimator)
    if num_steps != 1:
        yield "later steps of a rollout compare with the policy before the first"
    if args.loss_type != "policy_loss":
        yield f"--loss-type {args.loss_type} takes none from its own forward pass"
    if args.kl_coef != 0:
        yield "--kl-coef: the penalty is in the rewards"
    if args.use_opd:
        yield "--use-opd: the teacher's pull is in the advantages"
    if estimator.needs_values:
        yield f"--advantage-estimator {args.advantage_estimator}: the critic's rewards"
    if args.custom_advantage_function_path is not None:
        yield "--custom-advantage-function-path may read them"
    if not estimator.policy_loss.may_reuse_log_probs:
        yield f"--advantage-estimator {args.advantage_estimator}: its loss compares sequences"
    if args.keep_old_actor:
        yield "--keep-old-actor: they are those of other weights"
    if args.get_mismatch_metrics:
        yield "--get-mismatch-metrics"
    if args.use_routing_replay and not args.use_rollout_routing_replay:
        yield "--use-routing-replay: the pass records the routes"
    if args.use_rollout_entropy:
        yield "--use-rollout-entropy: the pass computes it"
