"""Quantized checkpoints of every family: exported bytes against the converter's, loaded values against plain ones.

python -m tests.matrix.quantized                    # all families, FP8 by blocks
python -m tests.matrix.quantized --family glm4 --recipe tensor channel
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from slime.backends.megatron_utils.models import find_weight_map
from slime.ext.low_precision.folders.run import rewrite_folder
from slime.ext.low_precision.folders.to_quantized import ToQuantized, to_fp8, to_int4
from slime.weights.quantize import read_format
from slime.weights.quantize.formats import PlainWeights, read_weight
from tests.matrix.case import FamilyCase, load_cases, read_config, read_tensors
from tests.matrix.comparisons import differing_tensors
from tests.matrix.parity import FamilyRun, leave_world, run_check
from tests.matrix.report import Cell, summary

GROUP = 8
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Values of e2m1 by their codes, without sign."""

Plain = Mapping[str, Tensor]


def modules_without_groups(plain: Plain) -> list[str]:
    """Matrices whose rows are not a multiple of the group size: they stay unquantized."""
    return [name.removesuffix(".weight") for name, t in plain.items() if t.dim() == 2 and t.size(1) % GROUP]


RECIPES: Mapping[str, Callable[[Plain, PlainWeights], ToQuantized]] = {
    # Small blocks with different sides: every matrix has several, some cut off by the edge.
    "block": lambda plain, kept: to_fp8("block", (32, 16), plain=kept),
    "block ue8m0": lambda plain, kept: to_fp8("block", (32, 16), "ue8m0", plain=kept),
    "block 128": lambda plain, kept: to_fp8("block", plain=kept),
    "channel": lambda plain, kept: to_fp8("channel", plain=kept),
    "tensor": lambda plain, kept: to_fp8("tensor", plain=kept),
    "int4": lambda plain, kept: to_int4(GROUP, ignore_rules=modules_without_groups(plain), plain=kept),
    "int4 asymmetric": lambda plain, kept: to_int4(
        GROUP, False, ignore_rules=modules_without_groups(plain), plain=kept
    ),
}


PUBLISHED = "published"
"""The recipe of a family's own form, which the case writes and no converter."""


class QuantizedRun:
    """One family's bf16 checkpoint, and the converter's result."""

    def __init__(self, case: FamilyCase, folder: Path, recipe: str) -> None:
        self.run = FamilyRun(case, folder)
        self.case = case
        self.folder = folder / "quantized"
        self.plain = read_tensors(self.run.bf16_folder)
        if recipe == PUBLISHED:
            assert case.publish is not None, case.name
            case.publish(self.run.bf16_folder, self.folder)
        else:
            kept = find_weight_map(case.config["model_type"]).plain
            rewrite_folder(RECIPES[recipe](self.plain, kept), self.run.bf16_folder, self.folder)
        self.stored = read_tensors(self.folder)

    def export(self) -> tuple[float, float, str]:
        """The trainer holds the unquantized weights and exports for the quantized checkpoint: the same bytes."""
        from slime.backends.megatron_utils.hf_checkpoint_saver import save_hf_model_to_path
        from slime.backends.megatron_utils.megatron_to_hf import checkpoint_quantizer, hf_form
        from slime.backends.megatron_utils.update_weight.gather import iter_hf_tensors

        config = read_config(self.folder)
        saved = self.run.work / "saved"
        with self.run.model(self.run.bf16_folder, "--bf16") as (args, model):
            args = Namespace(**{**vars(args), "hf_checkpoint": str(self.folder)})
            quantizer = checkpoint_quantizer(self.folder, config["quantization_config"])
            assert quantizer is not None
            save_hf_model_to_path(args, saved, model)
            plain = iter_hf_tensors(hf_form(args, config["model_type"]), model, dtype=torch.bfloat16)
            pushed = dict(output for name, tensor in plain for output in quantizer.quantize(name, tensor))
        assert read_config(saved) == config
        index = json.loads((saved / "model.safetensors.index.json").read_text())
        assert sorted(index["weight_map"]) == sorted(self.stored)
        problems = differing_tensors(read_tensors(saved), self.stored) + differing_tensors(
            pushed, self._trained(args, self.stored)
        )
        kept = [name for name, tensor in self.plain.items() if tensor.dim() == 2 and self._is_kept(name)]
        quantized = sum(not self._is_kept(name) for name in self.plain)
        return _outcome(problems, f"{quantized} tensors quantized, {len(kept)} matrices kept")

    def _trained(self, args: Namespace, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors that the trainer has: a vision tower only if the flags ask for it, keys only in layers that have
        them."""
        config = read_config(self.folder)
        if args.has_own_tower:
            return tensors
        weight_map = find_weight_map(config["model_type"])
        own = self.case.pushed(self.plain) if weight_map.spare and self.case.pushed else self.plain
        modules = {name.rpartition(".")[0] for name in own}
        return {
            name: tensor
            for name, tensor in tensors.items()
            if not weight_map.is_untrained(name) and name.rpartition(".")[0] in modules
        }

    def _is_kept(self, name: str) -> bool:
        return name in self.stored and self.stored[name].element_size() > 1

    def load(self) -> tuple[float, float, str]:
        """The trainer loads the quantized checkpoint as the values that its numbers represent."""
        from tests.matrix import trainer

        with self.run.model(self.folder, "--bf16") as (args, model):
            exported = dict(trainer.export(args, model, dtype=torch.bfloat16))
        problems = differing_tensors(exported, self._trained(args, self.expected_values()))
        return _outcome(problems, f"{len(exported)} tensors")

    def convert(self) -> tuple[float, float, str]:
        """The quantized checkpoint to torch_dist and back, with missing tensors copied from it: plain values."""
        from tools import convert_hf_to_torch_dist, convert_torch_dist_to_hf

        saved, back = self.run.work / "saved_dist", self.run.work / "back"
        argv = [*self.case.flags(self.folder), "--hf-checkpoint", self.folder, "--save", saved, "--bf16"]
        try:
            convert_hf_to_torch_dist.convert(convert_hf_to_torch_dist.parse([str(word) for word in argv]))
        finally:
            leave_world()
        argv = ["--input-dir", saved / "release", "--output-dir", back, "--origin-hf-dir", self.folder, "-a"]
        convert_torch_dist_to_hf.convert(convert_torch_dist_to_hf.parse([str(word) for word in argv]))
        assert "quantization_config" not in read_config(back)
        problems = differing_tensors(read_tensors(back), self.expected_values())
        return _outcome(problems, f"{len(self.plain)} tensors")

    def expected_values(self) -> dict[str, Tensor]:
        """Stored numbers times their scales; for FP8 and FP4 by the simplest possible expression."""
        config = read_config(self.folder)["quantization_config"]
        if config["quant_method"] == "compressed-tensors" and config["format"] == "pack-quantized":
            how = read_format(config)
            return {name: read_weight(name, self.stored.__getitem__, self.stored, how) for name in self.plain}
        block = config.get("weight_block_size")
        values = {}
        for name, tensor in self.stored.items():
            names = (f"{name}_scale_inv", f"{name}_scale", name.removesuffix("weight") + "scale")
            scale = next((self.stored[one] for one in names if one in self.stored and one != name), None)
            if scale is not None and tensor.dtype == torch.int8:
                codes = torch.stack([tensor.view(torch.uint8) & 15, tensor.view(torch.uint8) >> 4], 2).flatten(1)
                numbers = FP4[(codes & 7).int()] * (1 - 2.0 * (codes > 7))
                values[name] = (numbers * torch.kron(scale.float(), torch.ones(1, 32))).to(torch.bfloat16)
            elif scale is not None:
                if block:
                    scale = torch.kron(scale.float(), torch.ones(block))[: tensor.size(0), : tensor.size(1)]
                values[name] = (tensor.float() * scale).to(torch.bfloat16)
            elif not name.endswith(("_scale_inv", "weight_scale")) and tensor.dtype != torch.float8_e8m0fnu:
                values[name] = tensor
        return values


def check_quantized(case: FamilyCase, recipe: str = "block", *, converts: bool = False) -> list[Cell]:
    """The cells of one family and recipe, in a separate folder; with ``converts`` also those of the tools."""
    with tempfile.TemporaryDirectory(prefix=f"quantized-{case.name}-") as folder:
        run = QuantizedRun(case, Path(folder), recipe)
        checks = {"exported": run.export, "loaded": run.load}
        if converts:
            checks["converted"] = run.convert
        return [run_check(case.name, f"{recipe}: {name}", check) for name, check in checks.items()]


def _outcome(problems: list[str], detail: str) -> tuple[float, float, str]:
    return float(len(problems)), 0.0, "; ".join(problems[:4]) or detail


def main(argv: list[str] | None = None) -> int:
    """Run the chosen cells; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix.quantized", description=__doc__)
    parser.add_argument("--family", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--recipe", nargs="+", choices=RECIPES, default=["block"], help="default: block")
    options = parser.parse_args(argv)
    cells = []
    for case in (case for case in load_cases(options.family).values() if case.has_quantized_form):
        for recipe in (*options.recipe, *((PUBLISHED,) if case.publish else ())):
            for cell in check_quantized(case, recipe, converts=True):
                print(cell.describe(), flush=True)
                cells.append(cell)
    print(summary(cells))
    return 0 if cells and all(cell.passed for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
