"""DeepSeek-V3.2, and GLM-5 and GLM-5.2 (``glm_moe_dsa``), which share its layout of sparse attention."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from slime.backends.megatron_utils.flags.hf_config_check import read_hf_config
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.megatron_to_hf import hf_form
from slime.backends.megatron_utils.update_weight.gather import iter_hf_tensors
from slime.utils.errors import ConfigError


class DeepseekV32Bridge:
    """A bridge that loads and exports weights through the loader and exporter that all families share."""

    model_types = ("deepseek_v32", "glm_moe_dsa")

    def __init__(self, args: Namespace) -> None:
        """Take complete Megatron flags.

        Raises:
            ConfigError: ``--hf-checkpoint`` is a model of another type.
        """
        self.args = args
        self.model_type = self._check(args.hf_checkpoint)

    def load_weights(self, models: Sequence[torch.nn.Module], weights_path: str | Path) -> None:
        """Fill this rank's chunks from a HF checkpoint; errors as ``load_hf_weights`` raises them."""
        self._check(weights_path)
        load_hf_weights(self.args, models, weights_path)

    def export_weights(self, models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
        """Yield HF names and whole tensors, in the dtypes of the model.

        A collective: all ranks iterate to the end.
        """
        return iter_hf_tensors(hf_form(self.args, self.model_type), models, dtype=None)

    def _check(self, path: str | Path) -> str:
        model_type = read_hf_config(str(path)).get("model_type")
        if model_type not in self.model_types:
            raise ConfigError(
                f"{path} is a checkpoint of model_type {model_type!r}; this bridge serves "
                f"{' and '.join(self.model_types)}; other models are loaded without a bridge."
            )
        return model_type
