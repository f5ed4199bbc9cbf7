"""Several adapters that take turns in the one model of a run, as clients of a training service have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from slime.ext.lora.flags import LoraConfig
from slime.ext.lora.layers import draw_adapters
from slime.ext.lora.peft_folder import read_peft_folder, write_peft_folder
from slime.ext.lora.state import AdapterTable, fill_adapters, peft_tensors


class SeveralAdapters:
    """Numbers of adapters that take turns in a model.

    Those of a smaller rank are filled up with zeros, which stay zeros in training; all have the scale of the run.

    Args:
        table: of the run.
        base_model: ``--hf-checkpoint``, for PEFT's files.
    """

    def __init__(self, table: AdapterTable, base_model: str) -> None:
        self._table, self._base_model = table, base_model

    def hold(self, chunk: torch.nn.Module, values: Sequence[Tensor] | None, rows: Tensor | None = None) -> None:
        """Let a chunk compute with other numbers than its parameters', until the next call.

        Args:
            chunk: bare.
            values: in the order and shapes of ``Lora.named_parameters``; None: the parameters again.
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
        write_peft_folder(folder, tensors, self._config_of(rank), base_model=self._base_model, flag=str(folder))

    def read_folder(self, folder: Path, *, rank: int) -> dict[str, Tensor]:
        """Return the tensors of a PEFT folder.

        Raises:
            DataError: it is damaged, or of another rank or scale.
        """
        return read_peft_folder(folder, self._config_of(rank), flag=str(folder))

    def _config_of(self, rank: int) -> LoraConfig:
        config = self._table.config
        return replace(config, rank=rank, alpha=config.scale * rank)
