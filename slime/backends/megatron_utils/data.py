"""Turns one rank's train data into packed micro-batches on its device.

``slime.train_data`` decides which rank trains on which samples and how sequences are packed; this module takes the
parallel sizes from ``mpu`` and moves the tensors to the accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slime.backends.megatron_utils.cp_utils import local_responses
from slime.backends.megatron_utils.guide import LossTerm
from slime.backends.megatron_utils.model_transform import transforms_of
from slime.train_data.columns import COLUMNS, RankBatch
from slime.train_data.convert import sample_name
from slime.train_data.device_batch import DeviceBatch
from slime.train_data.microbatch import PackingConfig, align_loss_masks, pack_thd, packed_length, take_micro_batch
from slime.utils.errors import DataError

PER_TOKEN_COLUMNS = frozenset(
    name
    for name, column in COLUMNS.items()
    if column.span == "response" and column.dtype is not None and column.dtype.is_floating_point
)
"""Columns with one float per response token.  They arrive whole and are sliced for context parallelism here."""


def current_device() -> torch.device:
    """Return the device that this rank computes on."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def sum_over_ranks(counts: Tensor) -> Tensor:
    """Sum ``counts`` over all ranks, in place, and return it.  Collective over all ranks of the trainer."""
    for group in (
        mpu.get_data_parallel_group(with_context_parallel=True),
        mpu.get_tensor_model_parallel_group(),
        mpu.get_pipeline_model_parallel_group(),
    ):
        dist.all_reduce(counts, group=group)
    return counts


def prepare_rollout_data(batch: RankBatch, vocab_size: int | None = None) -> DeviceBatch:
    """Return the columns as the trainer's hooks see them: tensors on the device, per-token floats local to the
    context-parallel rank.

    Args:
        vocab_size: rows of the embedding.  Larger token ids are rejected here, because the failing CUDA kernel would
            not name the token.  None skips the check.

    Raises:
        DataError: a token id is outside the model's vocabulary.
    """
    data = DeviceBatch(batch.to_dict())
    device = current_device()
    tokens_N = [torch.as_tensor(tokens, dtype=torch.long) for tokens in batch.tokens]
    if vocab_size is not None:
        _check_tokens(tokens_N, vocab_size, batch)
    data.tokens = [tokens.to(device) for tokens in tokens_N]
    if batch.multimodal_train_inputs is not None:
        data.host_tokens = tokens_N
    data.response_lengths = [int(length) for length in batch.response_lengths]
    data.loss_masks = [torch.as_tensor(mask, dtype=torch.int, device=device) for mask in batch.loss_masks]
    data.rollout_mask_sums = torch.as_tensor(batch.rollout_mask_sums, dtype=torch.float32, device=device)
    for name in PER_TOKEN_COLUMNS & data.keys():
        whole = [torch.as_tensor(values, dtype=torch.float32) for values in data[name]]
        parts = local_responses(whole, data.total_lengths, data.response_lengths)
        data[name] = [values.to(device) for values in parts]
    return data


def _check_tokens(tokens_N: list[torch.Tensor], vocab_size: int, batch: RankBatch) -> None:
    for index, tokens in enumerate(tokens_N):
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            wrong = int(tokens.max()) if int(tokens.max()) >= vocab_size else int(tokens.min())
            raise DataError(
                f"{sample_name(batch, index)} has the token {wrong}; the model has the tokens 0 to {vocab_size - 1} "
                "(--vocab-size). Does the rollout function use the tokenizer of --hf-checkpoint?"
            )


class DataIterator:
    """Iterates over the micro-batches of one rank, through all steps of the rollout.

    Invariant: every sample belongs to exactly one micro-batch.
    """

    def __init__(self, rollout_data: Mapping[str, Any], micro_batch_indices: Sequence[Sequence[int]]) -> None:
        self.rollout_data = rollout_data
        self.micro_batch_indices = [list(indices) for indices in micro_batch_indices]
        self.reset()
        self.attach: Callable[[PackedSeqParams, int, Sequence[int]], None] | None = None
        """Callback for each packed micro-batch: its packing, its number, and the lengths of its samples."""
        self.kept: dict[int, dict[str, list[Tensor]]] | None = None
        """Micro-batch number -> name -> [r] per sample, values kept from the training pass.  None keeps nothing."""
        self.loss_terms: Sequence[LossTerm] = ()
        """Terms that guides add to the policy loss."""

    def get_next(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return the named columns of the next micro-batch; missing columns are None."""
        indices = self.micro_batch_indices[self.offset]
        self.offset += 1
        return take_micro_batch(self.rollout_data, indices, keys)

    def reset(self) -> None:
        self.offset = 0
        self.num_real_tokens, self.num_packed_tokens = 0, 0


_SCHEDULE = ("micro_batch_indices", "num_microbatches", "global_batch_sizes")


def sample_columns(rollout_data: Mapping[str, Any]) -> list[str]:
    """Return the names of the columns with one entry per sample of this rank, including user-defined ones."""
    num_samples = len(rollout_data["tokens"])
    of_batch = {name for name, column in COLUMNS.items() if column.scope == "batch"}
    return [
        name
        for name, values in rollout_data.items()
        if name not in of_batch
        and name not in _SCHEDULE
        and isinstance(values, (list, tuple, Tensor))
        and len(values) == num_samples
    ]


def get_data_iterator(rollout_data: Mapping[str, Any], num_chunks: int) -> list[DataIterator]:
    """Return one iterator per model chunk of this rank: every virtual stage visits all micro-batches."""
    return [DataIterator(rollout_data, rollout_data["micro_batch_indices"]) for _ in range(num_chunks)]


def get_batch(data_iterator: DataIterator, keys: Sequence[str], packing: PackingConfig) -> dict[str, Any]:
    """Pack the next micro-batch.

    Returns:
        the columns ``keys`` and these: packed ``tokens`` [1, T], ``unconcat_tokens`` ([L] per sample),
        ``total_lengths``, ``response_lengths``, ``loss_masks``, ``packed_seq_params``, ``full_loss_masks`` [1, T].
    """
    batch = data_iterator.get_next(["tokens", "total_lengths", "response_lengths", "loss_masks", *keys])
    batch["unconcat_tokens"] = batch["tokens"]
    packed = pack_thd(batch["tokens"], packing)
    batch["tokens"] = packed.tokens
    batch["packed_seq_params"] = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=packed.cu_seqlens,
        cu_seqlens_kv=packed.cu_seqlens,
        max_seqlen_q=packed.max_seqlen,
        max_seqlen_kv=packed.max_seqlen,
    )
    if data_iterator.kept is not None:
        batch["kept"] = data_iterator.kept.setdefault(data_iterator.offset - 1, {})
    if data_iterator.loss_terms:
        batch["loss_terms"] = data_iterator.loss_terms
    if data_iterator.attach is not None:
        data_iterator.attach(batch["packed_seq_params"], data_iterator.offset - 1, batch["total_lengths"])
    columns = batch["loss_masks"], batch["total_lengths"], batch["response_lengths"]
    batch["full_loss_masks"] = align_loss_masks(*columns, packing)
    data_iterator.num_real_tokens += packed.num_real_tokens
    data_iterator.num_packed_tokens += packed.tokens.numel() * packing.cp.size
    return batch


def packed_lengths(data_iterator: DataIterator, num_microbatches: int, packing: PackingConfig) -> list[int]:
    """Return the packed lengths T of the next micro-batches, without advancing the iterator."""
    total_lengths = data_iterator.rollout_data["total_lengths"]
    start = data_iterator.offset
    return [
        packed_length([total_lengths[index] for index in indices], packing)
        for indices in data_iterator.micro_batch_indices[start : start + num_microbatches]
    ]


def forward_arguments(model: torch.nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of the model's forward for a batch of :func:`get_batch`.

    Raises:
        DataError: samples have multimodal inputs, but no transform of the model takes them.
    """
    given = (transform.arguments(batch) for transform in transforms_of(model))
    taken = [arguments for arguments in given if arguments is not None]
    if batch.get("multimodal_train_inputs") and not taken:
        raise DataError(
            "samples have images, but the trainer's model takes none; give --multimodal-keys for a family whose tower "
            "it can have (docs/models.md), else --custom-model-provider-path."
        )
    mtp = {"mtp_inputs": batch["mtp_inputs"]} if batch.get("mtp_inputs") is not None else {}
    return {
        "input_ids": batch["tokens"],
        "position_ids": None,
        "attention_mask": None,
        "labels": None,
        "packed_seq_params": batch["packed_seq_params"],
        "loss_mask": batch["full_loss_masks"],
        **mtp,
        **{name: value for arguments in taken for name, value in arguments.items()},
    }
