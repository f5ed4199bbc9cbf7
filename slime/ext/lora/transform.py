"""Adapters as a run has them, in the model and in its checkpoints."""

from __future__ import annotations

import logging
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils import checkpoint, cpu_platform  # noqa: F401

# isort: split
from megatron.core.utils import unwrap_model

from slime.backends.megatron_utils.model_transform import AddedParameters
from slime.backends.megatron_utils.parameters import iter_shards
from slime.ext.lora.flags import LoraConfig, lora_alpha, lora_base
from slime.ext.lora.frozen_base import hold_quantized
from slime.ext.lora.layers import add_adapters, draw_adapters
from slime.ext.lora.peft_folder import read_peft_folder, write_peft_folder
from slime.ext.lora.state import (
    AdapterTable,
    adapter_table,
    fill_adapters,
    load_peft,
    peft_tensors,
    save_peft,
    sharded_entry,
)
from slime.flags.group import flag_of
from slime.utils.errors import DataError

logger = logging.getLogger(__name__)

_ADAPTER = re.compile(r"^(.*\.)lora\.[ab]$")


class Lora(AddedParameters):
    """Low-rank adapters of the actor; see the flags ``--lora-*``."""

    def __init__(self, args: Namespace) -> None:
        super().__init__(args)
        self.claim = f"--lora-rank {args.lora_rank} trains adapters"

    @cached_property
    def _table(self) -> AdapterTable:
        return adapter_table(self.args)

    def after_build(self, chunk: torch.nn.Module) -> None:
        """Freeze a chunk and put adapters on its layers.

        Raises:
            ConfigError: as :func:`add_adapters` says.
        """
        add_adapters(chunk, self._table, seed=self.args.seed)

    def owns(self, name: str) -> bool:
        """Return True for the name of an adapter's parameter."""
        return _ADAPTER.match(name) is not None

    def named_parameters(self, chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of a chunk's adapters."""
        for prefix, adapter in vars(chunk)["adapters"]:
            for name, parameter in adapter._parameters.items():
                yield f"{prefix}.{name}", parameter

    def silence(self, copies: Mapping[str, Tensor]) -> None:
        """Fill every B among the copies with zeros."""
        for name, tensor in copies.items():
            if name.endswith(".lora.b"):
                tensor.zero_()

    def load_frozen(self, model: list[torch.nn.Module]) -> None:
        """Load the model under the adapters, and hold it in the bits of ``--lora-base-precision``."""
        args, base = self.args, lora_base(self.args)
        step = args.ckpt_step if args.load == base else args.ref_ckpt_step
        given_as = next(name for name in ("ref_load", "load", "hf_checkpoint") if getattr(args, name) == base)
        step_flag = "--ref-ckpt-step" if given_as == "ref_load" else "--ckpt-step"
        checkpoint.load_weights(args, model, base, flag=flag_of(given_as), step=step, step_flag=step_flag)
        if args.lora_base_precision is not None:
            hold_quantized(model, args.lora_base_precision)

    def load_first(self, model: list[torch.nn.Module]) -> bool:
        """Read ``--lora-load`` where no save of adapters is there."""
        if self.args.load != lora_base(self.args):
            return False
        if self.args.lora_load is not None:
            load_peft(self._table, model, self.args.lora_load)
        return True

    def state(self, model: Sequence[torch.nn.Module]) -> dict[str, Any]:
        """Return the sharded state of the adapters, by name in the whole model."""
        is_gated = unwrap_model(model[0]).config.gated_linear_unit
        entries: dict[str, Any] = {}
        for shard in iter_shards(model, added=True):
            key = shard.name.removesuffix("{}")
            if key not in entries:
                entries[key] = sharded_entry(key, shard, is_gated=is_gated)
        return entries

    # Several adapters in one model (``slime.ext.training_api``).  Those of a smaller rank are filled up with zeros,
    # which stay zeros in training; all have the scale of the run.

    def hold(self, chunk: torch.nn.Module, values: Sequence[Tensor] | None, rows: Tensor | None = None) -> None:
        """Let a chunk compute with other numbers than its parameters', until the next call.

        Args:
            chunk: bare.
            values: in the order and shapes of :meth:`named_parameters`; None: the parameters again.
            rows: [G] integers: each of the values has an axis [G, ..] in front, and the first ``rows[0]`` tokens meet
                the first adapter.  Not for stacked experts, whose tokens come in another order.
        """
        given = iter(values or ())
        for _, adapter in vars(chunk)["adapters"]:
            adapter.held = None if values is None else (next(given), next(given), rows)

    def draw(self, model: Sequence[torch.nn.Module], *, seed: int, rank: int) -> None:
        """Give the adapters the first numbers of one of ``rank``."""
        draw_adapters(model, seed=seed, rank=rank)

    def as_peft(
        self, model: Sequence[torch.nn.Module], values: Mapping[str, Tensor], *, rank: int
    ) -> dict[str, Tensor]:
        """Return on rank 0 the numbers of an adapter by PEFT's names, fp32 on the host; {} on others.  Collective.

        Args:
            model: this rank's chunks.
            values: by :attr:`Shard.key`; what has the shape of the adapters, such as moments, will do.
            rank: of the adapter.
        """
        tensors = peft_tensors(self._table, model, host_weights=values, dtype=torch.float32)
        return {
            name: (tensor[:rank] if ".lora_A." in name else tensor[..., :rank]).contiguous()
            for name, tensor in tensors.items()
        }

    def from_peft(
        self,
        model: Sequence[torch.nn.Module],
        tensors: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        *,
        rank: int,
        source: str,
    ) -> None:
        """Write into ``values`` what :meth:`as_peft` made of others.  Collective.

        Raises:
            DataError: the tensors are of other modules or another rank; names ``source``.
        """
        fill_adapters(self._table, model, tensors, source=source, into=values, rank=rank)

    def write_folder(self, folder: Path, tensors: Mapping[str, Tensor], *, rank: int) -> None:
        """Write what :meth:`as_peft` gave as a PEFT folder."""
        base = str(self.args.hf_checkpoint)
        write_peft_folder(folder, tensors, self._config_of(rank), base_model=base, flag=str(folder))

    def read_folder(self, folder: Path, *, rank: int) -> dict[str, Tensor]:
        """Return the tensors of a PEFT folder.

        Raises:
            DataError: it is damaged, or of another rank or scale.
        """
        return read_peft_folder(folder, self._config_of(rank), flag=str(folder))

    def _config_of(self, rank: int) -> LoraConfig:
        config = self._table.config
        return replace(config, rank=rank, alpha=config.scale * rank)

    def check_saved(self, saved: Namespace, source: str) -> None:
        """Refuse adapters of another ``--lora-alpha``, and warn of those that were trained on another model.

        Raises:
            DataError: their alpha is another.
        """
        ours, theirs = lora_alpha(self.args), lora_alpha(saved)
        if ours != theirs:
            raise DataError(
                f"{source}: its adapters were trained with --lora-alpha {theirs:g}, and this run has {ours:g}, which "
                f"scales what they add to the model; give --lora-alpha {theirs:g}."
            )
        base, trained_on = lora_base(self.args), lora_base(saved)
        if dist.get_rank() == 0 and Path(base).resolve() != Path(trained_on).resolve():
            logger.warning(
                "%s: its adapters were trained on %s, and are added to %s now. Give the same weights as --ref-load.",
                source, trained_on, base,
            )  # fmt: skip

    @torch.no_grad()
    def load_state(self, model: Sequence[torch.nn.Module], state: Mapping[str, Tensor]) -> None:
        """Copy a checkpoint's adapters into the model."""
        for shard in iter_shards(model, added=True):
            shard.parameter.copy_(state[shard.name.removesuffix("{}")])

    def after_save(self, model: Sequence[torch.nn.Module], rollout_id: int) -> None:
        """Write the PEFT folder of ``--lora-save``."""
        if self.args.lora_save:
            folder = self.args.lora_save.format(rollout_id=rollout_id)
            save_peft(self._table, folder, model, base_model=str(self.args.hf_checkpoint))
