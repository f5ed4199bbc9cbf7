"""Quantization-aware training of a family against a plain model with the values that a push sends to int4 engines."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.ext.low_precision.folders.run import rewrite_folder
from slime.ext.low_precision.folders.to_quantized import to_int4
from slime.weights.quantize.group_int import dequantize_group, unpack
from tests.matrix.case import FamilyCase, load_cases, read_config, read_tensors, write_tensors
from tests.matrix.parity import FamilyRun

GROUP = 32
FLAGS = ("--int4-qat", "--int4-qat-group-size", GROUP)
DENSE_FLAGS = (*FLAGS, "--int4-qat-dense")
EXPERTS_ONLY = r"re:.*(self_attn|mlp\.(gate|up|down)_proj)"
"""Modules in the form of ``--ignore-rules``."""

SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "intermediate_size": 128,
}


def case_of(family: str) -> FamilyCase:
    """The family in sizes that are multiples of 32, also on two tensor-parallel ranks."""
    case = load_cases([family])[family]
    experts = {"moe_intermediate_size": 64} if case.has_experts else {}
    return dataclasses.replace(case, config={**case.config, **SIZES, **experts})


class Int4Run(FamilyRun):
    """One family, whose reference is the plain model with the values that a push represents.

    Args:
        case: a result of :func:`case_of`.
        folder: to work in.
        rounds_dense: round all linear layers, not only experts.
    """

    def __init__(self, case: FamilyCase, folder: Path, *, rounds_dense: bool) -> None:
        super().__init__(case, folder)
        self.flags = DENSE_FLAGS if rounds_dense else FLAGS
        self.plain_folder, self.engine_folder = self.folder, folder / "int4"
        recipe = to_int4(GROUP, ignore_rules=() if rounds_dense else (EXPERTS_ONLY,), scale_dtype=torch.float32)
        rewrite_folder(recipe, self.plain_folder, self.engine_folder)
        self.pushed = self._push()
        self.served = self._served()
        served_folder = folder / "served"
        shutil.copytree(self.plain_folder, served_folder)
        write_tensors(served_folder, self.served)
        self.reference_folder = served_folder

    def _push(self) -> dict[str, Tensor]:
        """The tensors, in fp32, of a push to engines that were started from the int4 folder."""
        from slime.backends.megatron_utils.megatron_to_hf import checkpoint_quantizer, hf_form
        from slime.backends.megatron_utils.update_weight.plain_push import iter_buckets
        from slime.backends.megatron_utils.update_weight.transport import SentWeights

        config = read_config(self.engine_folder)
        quantizer = checkpoint_quantizer(self.engine_folder, config["quantization_config"], dtype=torch.float32)
        with self.model() as (args, model):
            weights = SentWeights(
                form=hf_form(args, config["model_type"]), model=model, dtype=torch.float32, quantizer=quantizer,
                bucket_bytes=1 << 20,
            )  # fmt: skip
            with torch.no_grad():
                return {name: tensor.clone() for bucket in iter_buckets(weights) for name, tensor in bucket}

    def _served(self) -> dict[str, Tensor]:
        """The values by which an fp32 engine multiplies."""
        served = {}
        for name in read_tensors(self.plain_folder):
            base = name.removesuffix(".weight")
            if name in self.pushed:
                served[name] = self.pushed[name]
                continue
            rows, columns = map(int, self.pushed[f"{base}.weight_shape"])
            codes = unpack(self.pushed[f"{base}.weight_packed"], 4, columns)
            scale = self.pushed[f"{base}.weight_scale"]
            assert (codes.size(0), scale.dtype) == (rows, torch.float32)
            served[name] = dequantize_group(codes, scale, None, num_bits=4, dtype=torch.float32)
        return served

    @contextmanager
    def model(self, folder: Path | None = None, *flags: object) -> Iterator[Any]:
        """The trainer with its exact weights, which its layers round."""
        with super().model(folder or self.plain_folder, *self.flags, *flags) as made:
            yield made

    def reference(self) -> tuple[float, list[Tensor], dict[str, Tensor]]:
        """The plain model with the served values: its gradient is the straight-through one."""
        self.folder = self.reference_folder
        try:
            return super().reference()
        finally:
            self.folder = self.plain_folder

    def quantized_names(self) -> set[str]:
        """The weights that the int4 folder holds packed."""
        packed = ".weight_packed"
        return {name.replace(packed, ".weight") for name in read_tensors(self.engine_folder) if name.endswith(packed)}

    def rounded_weights(self) -> dict[str, Tensor]:
        """HF name and value of the weights by which the trainer's layers multiply, if these are not the parameters."""
        from slime.backends.megatron_utils.flags.model_dims import model_dims
        from slime.backends.megatron_utils.models import find_weight_map
        from slime.backends.megatron_utils.models.rule import to_hf
        from slime.backends.megatron_utils.parameters import iter_shards

        weight_map = find_weight_map(self.case.config["model_type"])
        found: dict[str, Tensor] = {}
        with self.model() as (args, model), torch.no_grad():
            dims = model_dims(args)
            rounding = {
                id(module._parameters["weight"]): module.weight
                for module in model[0].modules()
                if "int4_group_size" in vars(module)
            }
            for shard in iter_shards(model):
                if id(shard.parameter) in rounding:
                    value = shard.part_of(rounding[id(shard.parameter)])
                    found |= {n: t.clone() for n, t in to_hf(weight_map, shard.global_name(0, 0), value, dims)}
        return found
