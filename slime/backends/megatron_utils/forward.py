"""Runs a rank's micro-batches through the model: for a training step, or forward only for log-probs, entropies and
values.  Also decides whether the old log-probs need a forward pass.

Micro-batches are packed to different lengths.  In megatron-core each pipeline stage sends its neighbor the shape of
the next tensor, which synchronizes both devices; with two stages and virtual stages in each, both neighbors are the
same rank and those messages pair up wrongly.  Here only the tensors are sent: all stages hold the same samples, so
every stage knows the lengths of all micro-batches, and the schedule gives the order in which they arrive.
"""

from __future__ import annotations

from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor

from slime.algorithms.advantages import get_estimator
from slime.backends.megatron_utils.cp_utils import packing_of
from slime.backends.megatron_utils.data import DataIterator, forward_arguments, get_batch, packed_lengths
from slime.backends.megatron_utils.log_probs import Reader, reader_columns
from slime.backends.megatron_utils.loss import applies_correction
from slime.backends.megatron_utils.reloadable_groups import plain_group
from slime.observability.pulse import Pulse
from slime.train_data.microbatch import PackingConfig
from slime.utils.misc import call_hook

_KEYS = ("multimodal_train_inputs", "host_tokens")
_TOP_P_KEYS = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets")


def run_model(model: torch.nn.Module, batch: dict[str, Any]) -> Tensor:
    """Compute the logits of a packed batch in the model's precision: the softmax is computed in fp32 anyway."""
    arguments = forward_arguments(model, batch)
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
    """Run the model over all micro-batches of all steps, and apply ``read`` to the logits of each.

    Args:
        model: this rank's chunks; put into evaluation mode for the pass.
        data_iterator: one per chunk; they are reset.
        num_microbatches: micro-batches of each step.
        store_prefix: put before the names that ``read`` returns (``"ref_"``).

    Returns:
        ``{prefix + name: [one tensor per sample]}`` on the last pipeline stage, an empty dict on the others.
    """
    was_training = [chunk.training for chunk in model]
    for iterator in data_iterator:
        iterator.reset()
    for chunk in model:
        chunk.eval()
    if path := args.custom_megatron_before_log_prob_hook_path:
        call_hook("--custom-megatron-before-log-prob-hook-path", path, args, list(model), store_prefix)
    packing = packing_of(args)
    keys = [*_KEYS, *(_TOP_P_KEYS if args.rollout_top_p != 1.0 else ())]

    def step(iterator: DataIterator, chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        batch = get_batch(iterator, keys, packing)
        logits = run_model(chunk, batch)
        return logits, partial(read, args=args, with_entropy=args.use_rollout_entropy, **reader_columns(batch))

    outputs: list[dict[str, list[Tensor]]] = []
    for count in num_microbatches:
        outputs += run_microbatches(step, model, data_iterator, count, packing, forward_only=True)
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
    """Return True if computing the old log-probs takes an extra forward pass before training.

    With the engine's log-probs as the old ones (``--use-rollout-logprobs``), the pass is needed only to compare them
    with the trainer's, or for the entropy that it also computes.  Otherwise the pass is skipped if the rollout has
    one optimizer step, whose forward pass gives the same numbers, and nothing reads them before that step.
    """
    if args.use_rollout_logprobs:
        return args.get_mismatch_metrics or args.use_rollout_entropy or applies_correction(args)
    return next(readers_of_old_log_probs(args, num_steps), None) is not None


def readers_of_old_log_probs(args: Namespace, num_steps: int) -> Iterator[str]:
    """Yield each reason for an extra forward pass, in words."""
    estimator, name = get_estimator(args.advantage_estimator), f"--advantage-estimator {args.advantage_estimator}"
    for is_so, reason in (
        (num_steps != 1, "later steps of a rollout compare with the policy before the first"),
        (args.loss_type != "policy_loss", f"--loss-type {args.loss_type} takes none from its own forward pass"),
        (args.kl_coef != 0, "--kl-coef: the penalty is in the rewards"),
        (estimator.needs_values, f"{name}: the critic's rewards"),
        (args.custom_advantage_function_path is not None, "--custom-advantage-function-path may read them"),
        (not estimator.policy_loss.may_reuse_log_probs, f"{name}: its loss compares sequences"),
        (args.keep_old_actor, "--keep-old-actor: they are those of other weights"),
        (args.get_mismatch_metrics, "--get-mismatch-metrics"),
        (args.use_routing_replay and not args.use_rollout_routing_replay, "--use-routing-replay: it records routes"),
        (args.use_rollout_entropy, "--use-rollout-entropy: the pass computes it"),
    ):
        if is_so:
            yield reason
    yield from args.advantage_terms


ForwardStep = Callable[[DataIterator, torch.nn.Module], tuple[Tensor, Callable[[Tensor], Any]]]
"""Takes the next micro-batch from the iterator.  Returns the chunk's output, and the function that turns the output of
the last stage into a loss or a reading."""

Shape = tuple[int, int, int]


def run_microbatches(
    step: ForwardStep,
    model: Sequence[torch.nn.Module],
    data_iterator: Sequence[DataIterator],
    num_microbatches: int,
    packing: PackingConfig,
    *,
    forward_only: bool,
) -> list[Any]:
    """Run all micro-batches of a step through this rank's chunks, forward and (unless ``forward_only``) backward.

    Args:
        step: see :data:`ForwardStep`.
        data_iterator: one per chunk, positioned at the first micro-batch of the step.
        num_microbatches: micro-batches of the step, the same on every rank.

    Returns:
        one report per micro-batch, in order, on the last pipeline stage; an empty list on other stages.
    """
    options: dict[str, Any] = {}
    communicator: KnownShapes | None = None
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        config = get_model_config(model[0])
        lengths = packed_lengths(data_iterator[0], num_microbatches, packing)
        groups = _process_groups()
        communicator = KnownShapes(groups.pp, config, lengths, num_chunks=len(model))
        options = {"pg_collection": groups, "p2p_communicator": communicator}
    phase = "micro-batch of a forward pass" if forward_only else "micro-batch of training"

    def marked(iterator: DataIterator, chunk: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        Pulse().mark(phase)
        return step(iterator, chunk)

    reports = get_forward_backward_func()(
        forward_step_func=marked,
        data_iterator=list(data_iterator),
        model=list(model),
        num_microbatches=num_microbatches,
        seq_length=1,  # ignored, as is micro_batch_size: KnownShapes gives the shape of each message
        micro_batch_size=1,
        forward_only=forward_only,
        **options,
    )
    if communicator is not None:
        communicator.finish()
    Pulse().mark(None if forward_only else "optimizer step")
    return reports


class KnownShapes(P2PCommunicator):
    """Point-to-point exchange of activations and gradients between pipeline stages that know every shape.

    Each message from a neighbor is the output of one of its micro-batches.  Messages in one direction arrive in the
    order they were sent, which is the order of the neighbor's schedule.  One table serves both directions: the
    backward pass visits the chunks in reverse.

    Args:
        lengths: packed tokens of each micro-batch of the step on one context-parallel rank.
    """

    def __init__(self, pp_group: Any, config: TransformerConfig, lengths: Sequence[int], *, num_chunks: int) -> None:
        super().__init__(plain_group(pp_group), config)
        split = config.tensor_model_parallel_size if config.sequence_parallel else 1
        group_size = config.microbatch_group_size_per_vp_stage or pp_group.size()
        table = get_schedule_table(len(lengths), num_chunks, group_size)
        # Families whose layers pass on more than one hidden state per token set ``stage_width`` on their config.
        width = vars(config).get("stage_width", config.hidden_size)
        shapes: list[Shape] = [(length // split, 1, width) for length in lengths]
        is_first, is_last = pp_group.rank() == 0, pp_group.rank() == pp_group.size() - 1
        # The stages form a ring.  In the forward pass the first stage follows the last one, whose last chunk ends the
        # model and sends nothing; in the backward pass the first chunk of the first stage sends nothing.
        ends = num_chunks - 1
        self._from_previous = deque(shapes[m] for m, chunk in table if not (is_first and chunk == ends))
        self._from_next = deque(shapes[m] for m, chunk in table if not (is_last and chunk == ends))
        self._last_sent: dict[str, Any] = {}

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape, Shape]:
        """Return the shapes that the previous and the next stage send next; the base class calls it per exchange."""
        nothing: Shape = (0, 0, 0)
        previous = self._from_previous.popleft() if recv_prev else nothing
        return previous, self._from_next.popleft() if recv_next else nothing

    def _communicate(self, **arguments: Any) -> tuple[Tensor | None, Tensor | None, Any]:
        """Exchange with the neighbors once.  Return the received tensors, and any requests still pending, by name."""
        previous, following, requests = super()._communicate(**arguments)
        if requests:
            self._last_sent |= {name: request for name, request in requests.items() if name.startswith("send")}
        return previous, following, requests

    def finish(self) -> None:
        """Wait for the last sends, which the schedules do not: gloo drops a message whose request is collected."""
        for request in self._last_sent.values():
            if not request.is_completed():
                request.wait()
        self._last_sent.clear()
        assert not self._from_previous, f"{len(self._from_previous)} messages of the previous stage never came"


def _process_groups() -> ProcessGroupCollection:
    """Return the process groups that the schedules and the finalization of gradients use."""
    groups: Any = ProcessGroupCollection()
    groups.tp = mpu.get_tensor_model_parallel_group()
    groups.cp = mpu.get_context_parallel_group()
    groups.pp = mpu.get_pipeline_model_parallel_group()
    groups.embd = mpu.get_embedding_group(check_initialized=False)
    groups.pos_embd = mpu.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = mpu.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return groups
