"""Adapters as a run has them, in the model and in its checkpoints."""

from __future__ import annotations

import logging
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
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
from slime.ext.lora.flags import lora_alpha, lora_base
from slime.ext.lora.frozen_base import hold_quantized
from slime.ext.lora.layers import add_adapters
from slime.ext.lora.several_adapters import SeveralAdapters
from slime.ext.lora.state import (
    AdapterTable,
    adapter_table,
    load_peft,
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

    @property
    def several(self) -> SeveralAdapters:
        """What lets several adapters take turns in the model."""
        return SeveralAdapters(self._table, str(self.args.hf_checkpoint))

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

    def check_saved(self, saved: Namespace, source: str) -> None:
        """Refuse adapters of another ``--lora-alpha``, and warn of those that were trained on another model.

        Raises:
            DataError: their alpha is another.
        """
        ours, theirs = (lora_alpha(each.lora_rank, each.lora_alpha) for each in (self.args, saved))
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
