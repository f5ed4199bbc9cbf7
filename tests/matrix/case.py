"""The matrix's description of a model family: a tiny awkward config, its flags, its reference.

A family is one file, ``tests/matrix/families/<family>.py``, which defines ``CASE = FamilyCase(...)`` (or ``CASES``, a
tuple, when one family has variants that differ in code).  Everything else is derived: the checkpoint is written by
transformers itself, and the checks of ``parity`` and the layouts of ``layouts`` run for every case.

Names and shapes are those of the checkpoint on disk, which engines load; how transformers holds a model in
memory (fused experts) does not matter here.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slime.utils.torchvision_package import import_torchvision
from slime.weights.stacked_experts import by_expert
from tests.matrix.flags import model_flags

FAMILIES = Path(__file__).parent / "families"
WEIGHT_STD = 0.12
"""Standard deviation of every matrix: the usual 0.02 would hide wrong gradients."""
ROUTER_BIAS = "e_score_correction_bias"
FP32_IN_BF16_CHECKPOINTS = (
    ROUTER_BIAS,
    "A_log",
    "linear_attn.norm.weight",
    "block_sparse_moe.gate.weight",
    *("ffn.gate.bias", "attn_sink", "compressor.ape", "_fn", "_base", "attn_scale", "ffn_scale", "head_scale"),
)
"""Tensors that stay fp32 in a bf16 checkpoint, as in published ones."""

Tensors = dict[str, Tensor]
SMALL = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
"""Common config of most cases: sizes that no layout divides evenly."""


@dataclass(frozen=True)
class FamilyCase:
    """One model family in one awkward little shape."""

    name: str
    """Row of the matrix: ``qwen3_moe``."""
    config: Mapping[str, Any]
    """Settings of the HF config, including ``model_type``."""
    flags: Callable[[Path], list[str]] = model_flags
    """Megatron model flags for the checkpoint folder, without ``--hf-checkpoint``."""
    architecture: str = ""
    """``architectures`` of a config that transformers does not know, which is then written as plain JSON."""
    extra_tensors: Callable[[Mapping[str, Any], torch.Generator], Tensors] | None = None
    """Function of (config, generator) that returns tensors that transformers does not write (MTP); they go through
    every round trip."""
    write: Callable[[FamilyCase, Path, int], None] | None = None
    """(case, folder, seed): writes config and safetensors; None lets transformers write them."""
    reference: Callable[[Path], torch.nn.Module] | None = None
    """Function from a folder to a model whose call with ids [1, L] returns logits [1, L, vocab], or an object with
    ``.logits``, and whose parameters are named as in the checkpoint; None loads it with transformers."""
    extra_loss: Callable[[torch.nn.Module, Sequence[Mapping[str, Any]]], Tensor] | None = None
    """Function of (reference, samples) that returns an extra loss (MTP); samples as in ``batch.samples_of``."""
    pushed: Callable[[Mapping[str, Tensor]], Tensors] | None = None
    """Function from a folder's tensors to what a push sends of them, if that differs."""
    add_images: Callable[[dict[str, Any]], None] | None = None
    """Function that adds images to train data: their tokens before prompts, and the column
    ``multimodal_train_inputs``."""
    max_tp: int = 2
    """Largest tensor-parallel size that the sizes allow."""
    has_stages: bool = True
    """Whether its layers can be split over pipeline stages."""
    has_experts: bool = False
    """Whether expert-parallel layouts make sense."""
    has_quantized_form: bool = True
    """Whether converters and engines support it in FP8 or int4."""
    publish: Callable[[Path, Path], None] | None = None
    """Writes (second folder) a bf16 folder (first) in its published quantized form, if no converter does."""
    about: str = ""
    """Its awkward features in a few words, for benchmarks/results."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self.config["vocab_size"])

    def write_checkpoint(self, folder: Path, seed: int = 0) -> None:
        """Write config and fp32 safetensors to ``folder``, including extra tensors."""
        (self.write or write_with_transformers)(self, folder, seed)
        (folder / "tokenizer.json").write_text("{}")  # the flags' check requires one; nothing here tokenizes

    def read_pushed(self, folder: Path) -> Tensors:
        """The tensors of a folder under the names, and in the pieces, in which a push sends them."""
        tensors = read_tensors(folder)
        return tensors if self.pushed is None else self.pushed(tensors)

    def load_reference(self, folder: Path) -> torch.nn.Module:
        """The plain model that the trainer is compared with, in fp32."""
        return (self.reference or load_with_transformers)(folder).eval()


def load_cases(names: Sequence[str] | None = None) -> dict[str, FamilyCase]:
    """The cases of all family files, or those of the given names (of a case or of its file).

    Raises:
        ValueError: there is no such family (the message lists all), or a file cannot be imported.
    """
    cases: dict[str, FamilyCase] = {}
    groups: dict[str, list[str]] = {}
    broken: list[str] = []
    for path in sorted(FAMILIES.glob("*.py")):
        try:
            module = importlib.import_module(f"tests.matrix.families.{path.stem}")
        except Exception as error:  # noqa: BLE001 - matters only to who asks for this family
            broken.append(f"{path.name} cannot be imported: {error!r}")
            continue
        for case in getattr(module, "CASES", None) or (module.CASE,):
            assert case.name not in cases, f"two family files define {case.name}"
            cases[case.name] = case
            groups.setdefault(path.stem, []).append(case.name)
    if not names and not broken:
        return cases
    names = names or ()
    unknown = [name for name in names if name not in cases and name not in groups]
    if unknown or not names:
        missing = [f"no family {', '.join(unknown)}; there are {', '.join(cases)}"] if unknown else []
        raise ValueError("; ".join([*missing, *broken]))
    chosen = [member for name in names for member in ([name] if name in cases else groups[name])]
    return {name: cases[name] for name in dict.fromkeys(chosen)}


# Checkpoints


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json``."""
    return json.loads((folder / "config.json").read_text())


def read_tensors(folder: Path) -> Tensors:
    """Every tensor of a folder of safetensors."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def write_tensors(folder: Path, tensors: Tensors) -> None:
    """Write one safetensors file, replacing any others."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


def random_tensor(name: str, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """A tensor large enough to show errors: norms about 1, router biases of both signs, matrices about 0."""
    tensor = torch.randn(*shape, generator=generator) * WEIGHT_STD
    return tensor + 1.0 if "norm" in name and name.endswith("weight") else tensor


def write_bf16_copy(source: Path, target: Path) -> None:
    """The checkpoint like published ones: bf16, except for the tensors that stay fp32."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = read_tensors(source)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not name.endswith(FP32_IN_BF16_CHECKPOINTS):
            tensors[name] = tensor.to(torch.bfloat16)
    write_tensors(target, tensors)
    config = read_config(target)
    config.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2))


def hide_broken_torchvision() -> None:
    """Tell transformers that there is no torchvision, if the installed one does not fit this torch.

    Text models do not need it, but transformers imports it with them whenever it finds the package.
    """
    if importlib.util.find_spec("torchvision") is None:
        return  # transformers sees that itself, and may look again when SGLang provides a stub
    if not import_torchvision():
        import transformers.utils
        import transformers.utils.import_utils

        for module in (transformers.utils, transformers.utils.import_utils):
            module.is_torchvision_available = lambda: False


def write_with_transformers(case: FamilyCase, folder: Path, seed: int) -> None:
    """A random model of the config, saved by transformers, and then the extra tensors."""
    hide_broken_torchvision()
    import transformers

    settings = dict(case.config)
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    state = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n.endswith(ROUTER_BIAS))]
    with torch.no_grad():
        for name, tensor in state:
            tensor.copy_(random_tensor(name, tensor.shape, generator))
    with quiet_transformers():
        model.save_pretrained(folder)
    if case.extra_tensors is not None:
        write_tensors(folder, read_tensors(folder) | case.extra_tensors(case.config, generator))


def load_with_transformers(folder: Path) -> torch.nn.Module:
    """The transformers model in fp32, with the plain attention formula."""
    hide_broken_torchvision()
    import transformers

    with quiet_transformers():
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )


class quiet_transformers:  # noqa: N801 - a context manager, named as what it does
    """Disable progress bars and messages about tensors that a model ignores (MTP)."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self._verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        logging.disable_progress_bar()

    def __exit__(self, *error: object) -> None:
        from transformers.utils import logging

        logging.set_verbosity(self._verbosity)
        logging.enable_progress_bar()


# The reference's answers, under checkpoint names


def reference_logits(model: torch.nn.Module, tokens: Tensor, images: Mapping[str, Tensor] | None = None) -> Tensor:
    """Logits [L, vocab] of one sequence [L]."""
    if images:
        is_image = (tokens == model.config.image_token_id)[None].int()
        return model(tokens[None], mm_token_type_ids=is_image, **images).logits[0].float()
    output = model(tokens[None])
    return getattr(output, "logits", output)[0].float()


def gradients_by_checkpoint_name(model: torch.nn.Module) -> Tensors:
    """The gradients of all parameters after a backward pass, with a push's names and shapes.

    They replace the parameters and are saved by transformers, so that its renaming, splitting and fusing on the way to
    a checkpoint also applies to them.  A parameter without gradient gives zeros.
    """
    if not hasattr(model, "save_pretrained"):
        return {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            for name, parameter in model.named_parameters()
        }
    gradients = copy.deepcopy(model)
    with torch.no_grad():
        for target, parameter in zip(gradients.parameters(), model.parameters(), strict=True):
            target.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for buffer in gradients.buffers():
            buffer.zero_()  # a router's bias is also saved, but has no gradient
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        gradients.save_pretrained(folder)
        return dict(by_expert(read_tensors(Path(folder))))
