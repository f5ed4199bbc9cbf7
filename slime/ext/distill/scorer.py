"""Log-probs of given tokens under one model, computed by all ranks of a Megatron group.

Rank 0 leads: each of its calls is broadcast, and the other ranks take part in it from ``Scorer.follow``.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu

from slime.backends.megatron_utils.checkpoint import load_checkpoint
from slime.backends.megatron_utils.cp_utils import whole_responses
from slime.backends.megatron_utils.data import current_device, get_data_iterator
from slime.backends.megatron_utils.forward import forward_only
from slime.backends.megatron_utils.log_probs import get_log_probs_and_entropy
from slime.backends.megatron_utils.model import build_model
from slime.backends.megatron_utils.model_transform import ModelTransform
from slime.ext.distill.flags import TeacherServerConfig
from slime.ext.distill.guide import get_log_probs_and_top
from slime.train_data.bins import first_fit
from slime.train_data.device_batch import DeviceBatch
from slime.utils.distributed_utils import gather_objects
from slime.utils.errors import DataError, SlimeError

logger = logging.getLogger(__name__)

_NO_SAMPLE = -1
"""Index of the sequence that fills a micro-batch of a rank without sequences."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A request: the log-probs of ``tokens[start + 1:]``, and at each of them the ``top`` likeliest tokens."""

    tokens: list[int]
    start: int = 0
    top: int = 0


@dataclass(frozen=True, slots=True)
class Scores:
    """The answer: nats at temperature 1, for each token after ``start``."""

    log_probs: list[float]
    top_ids: list[list[int]]
    top_log_probs: list[list[float]]


_Call = tuple[Literal["score", "load", "idle", "stop"], Any]
"""What rank 0 does, and with what: the sequences, or the folder."""


class Scorer:
    """The model of one rank.  Every method but ``follow`` is called on rank 0 alone.

    Args:
        args: complete Megatron flags and those of the server; ``load`` names the weights, else ``hf_checkpoint``.
            The default process group and the parallel groups exist.
        transforms: change the model after it is built.

    Raises:
        DataError: the weights cannot be loaded.
    """

    def __init__(self, args: Namespace, transforms: Sequence[type[ModelTransform]] = ()) -> None:
        config = TeacherServerConfig.of(args)
        one_temperature = {"rollout_temperature": 1.0, "rollout_top_p": 1.0, "use_rollout_entropy": False}
        chunk = config.teacher_label_reduction_chunk_size
        self._args = Namespace(**{**vars(args), **one_temperature, "log_probs_chunk_size": chunk, "finetune": True})
        self._top_rows = config.teacher_sample_reduction_chunk_size
        self._model = build_model(self._args, transforms=transforms, wrap_with_ddp=False)
        self._load(args.load or args.hf_checkpoint, args.ckpt_step)

    @property
    def tokens_at_once(self) -> int:
        """Tokens of one micro-batch on every data-parallel rank."""
        return self._capacity * mpu.get_data_parallel_world_size()

    @property
    def _capacity(self) -> int:
        return int(self._args.max_tokens_per_gpu or 0) * mpu.get_context_parallel_world_size()

    # --- rank 0

    def score(self, sequences: Sequence[ScoreRequest]) -> list[Scores]:
        """Return the scores of each sequence."""
        self._broadcast(("score", list(sequences)))
        return self._score(sequences)

    def load(self, folder: str) -> None:
        """Load other weights, from a Hugging Face folder or a Megatron checkpoint.

        Raises:
            DataError: a rank could not load them; what is in the model now is undefined.
        """
        self._broadcast(("load", folder))
        self._load_on_all(folder)

    def keep_alive(self) -> None:
        """Let the other ranks begin a new wait, before the old one ends at the group's deadline."""
        self._broadcast(("idle", None))

    def stop(self) -> None:
        """Let the other ranks return from ``follow``."""
        self._broadcast(("stop", None))

    # --- the other ranks

    def follow(self) -> None:
        """Take part in what rank 0 does, until it stops."""
        while True:
            call, what = self._broadcast(None)
            if call == "stop":
                return
            if call == "score":
                self._score(what)
            elif call == "load":
                with contextlib.suppress(DataError):  # rank 0 has it as well, and tells who asked
                    self._load_on_all(what)

    # --- all ranks

    @staticmethod
    def _broadcast(call: _Call | None) -> _Call:
        box: list[Any] = [call]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def _load_on_all(self, folder: str) -> None:
        """Load weights; raises on every rank where one could not: each reads but what it holds."""
        verdict = ""
        try:
            self._load(folder)
        except SlimeError as error:
            logger.warning("The weights of %s were not loaded: %s", folder, error)
            verdict = str(error)
        verdicts = gather_objects(verdict, dist.group.WORLD)
        if any(verdicts):
            raise DataError(next(filter(None, verdicts)))

    def _load(self, folder: str, step: int | None = None) -> None:
        load_checkpoint(Namespace(**{**vars(self._args), "load": folder, "ckpt_step": step}), self._model)
        logger.info("The teacher has the weights of %s.", folder)

    def _score(self, sequences: Sequence[ScoreRequest]) -> list[Scores]:
        """Compute this rank's micro-batches; return all scores on rank 0, nothing on the others."""
        mine = self._micro_batches([len(one.tokens) for one in sequences])
        order = list(itertools.chain.from_iterable(mine))
        data = _batch([sequences[index] if index != _NO_SAMPLE else ScoreRequest([0, 0]) for index in order])
        bounds = itertools.pairwise(itertools.accumulate(map(len, mine), initial=0))
        data.micro_batch_indices = [list(range(first, last)) for first, last in bounds]
        top = max((one.top for one in sequences), default=0)
        args = Namespace(**{**vars(self._args), "opd_top_k": top})
        read = partial(get_log_probs_and_top, rows_per_chunk=self._top_rows) if top else get_log_probs_and_entropy
        iterators = get_data_iterator(data, len(self._model))
        columns = forward_only(read, args, self._model, iterators, [len(mine)])
        scores: dict[int, Scores] = {}
        if columns:  # on the last pipeline stage
            whole = {
                name: [part.cpu() for part in whole_responses(parts, data.total_lengths, data.response_lengths)]
                for name, parts in columns.items()
            }
            for position, index in enumerate(order):
                if index != _NO_SAMPLE:
                    k = sequences[index].top
                    top_R2K = whole["top"][position][:, :, :k] if k else None
                    scores[index] = Scores(
                        log_probs=whole["log_probs"][position].tolist(),
                        top_ids=top_R2K[:, 0].long().tolist() if top_R2K is not None else [],
                        top_log_probs=top_R2K[:, 1].tolist() if top_R2K is not None else [],
                    )
        return _on_rank_zero(scores, len(sequences))

    def _micro_batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return this data-parallel rank's micro-batches of indices; every rank has as many, because layers of
        experts need all ranks in each.
        """
        bins = first_fit(lengths, self._capacity or max(lengths))
        virtual = mpu.get_virtual_pipeline_model_parallel_world_size() or 1
        config: Any = self._model[0].config
        group = config.microbatch_group_size_per_vp_stage if virtual > 1 else 1
        size = mpu.get_data_parallel_world_size()
        multiple = size * group
        bins += [[_NO_SAMPLE]] * (math.ceil(len(bins) / multiple) * multiple - len(bins))
        return bins[mpu.get_data_parallel_rank() :: size]


def _batch(sequences: Sequence[ScoreRequest]) -> DeviceBatch:
    data, device = DeviceBatch(), current_device()
    data.tokens = [torch.tensor(one.tokens, dtype=torch.long, device=device) for one in sequences]
    data.total_lengths = [len(one.tokens) for one in sequences]
    data.response_lengths = [len(one.tokens) - 1 - one.start for one in sequences]
    data.loss_masks = [torch.ones(length, dtype=torch.int, device=device) for length in data.response_lengths]
    return data


def _on_rank_zero(scores: dict[int, Scores], count: int) -> list[Scores]:
    """Gather the scores of all data-parallel ranks; each is on every tensor and context rank of its last stage."""
    is_first = mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(scores if is_first else {}, parts, dst=0)
    if parts is None:
        return []
    everything = {index: value for part in parts for index, value in part.items()}
    return [everything[index] for index in range(count)]
