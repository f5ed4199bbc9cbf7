"""Plain weights into a format of ``slime.weights.quantize.formats``: FP8 or packed integers.

The maths is the same as in a trainer's push, so that both give the same bytes.  :func:`to_fp8` and
:func:`to_int4` serve the tools: they check the flags and give the quantization entry of config.json.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from slime.ext.low_precision.folders.plan import HfSource, OutputRows, TensorPlan, copied, shown
from slime.ext.low_precision.folders.tensor_file import RowReader
from slime.utils.errors import ConfigError
from slime.weights.quantize.block_fp8 import DEFAULT_BLOCK
from slime.weights.quantize.formats import (
    SUFFIX,
    BlockFp8,
    ChannelFp8,
    GroupInt,
    PlainWeights,
    TensorFp8,
    WeightFormat,
    is_quantized_offline,
    modules_to_not_convert,
)
from slime.weights.stacked_experts import Stack, expert_names, find_stacks, is_stack, tensors_in
from slime.weights.stored_tensors import StoredTensor, TensorInfo

QUANTIZABLE = ("BF16", "F16", "F32")
SHAPE_PART = "weight_shape"


@dataclass(frozen=True)
class ToQuantized:
    """The conversion; a :class:`slime.ext.low_precision.folders.plan.Rewrite`."""

    format: WeightFormat
    row_multiple: int | None
    """Rows of a weight that can be quantized without the others are multiples of this; None: only all of them."""
    is_quantized: Callable[[str, tuple[int, ...]], bool]
    """By name and shape."""
    quantization_config: Callable[[Collection[str]], dict[str, Any]]
    """Quantization entry of config.json, given the names of all tensors of the source."""
    settings: dict[str, Any]
    """Settings that distinguish two conversions."""

    def check(self, source: HfSource) -> None:
        """Refuse sources that are quantized, or hold nothing to quantize.

        Raises:
            ConfigError: naming the tensors.
        """
        require_plain(source)
        biased = [name for name in source.tensors if is_stack(name) and f"{name}_bias" in source.tensors]
        if biased:
            raise ConfigError(
                f"{source.folder} has biases beside stacked experts: {shown(biased)}; no engine loads such "
                "experts in this format"
            )
        stacks = _stacks_of(source)
        chosen = [name for name, stored in source.tensors.items() if self._chooses(stored, stacks)]
        wrong = [name for name in chosen if source.tensors[name].dtype not in QUANTIZABLE]
        if wrong:
            raise ConfigError(
                f"{len(wrong)} weights to be quantized have other dtypes than {', '.join(QUANTIZABLE)}, such as "
                f"{source.tensors[wrong[0]].dtype}: {shown(wrong)}; give the unquantized checkpoint"
            )
        if not chosen:
            raise ConfigError(f"nothing in {source.folder} would be quantized; no name and shape fits the rules")

    def plan_tensor(self, source: HfSource, stored: StoredTensor) -> TensorPlan:
        """Quantize the weights of linear layers, those of stacked experts one by one; copy everything else."""
        stacks = _stacks_of(source) if is_stack(stored.name) else {}
        if not self._chooses(stored, stacks):
            return copied(stored)
        if stored.name in stacks:
            return self._plan_stack(stored, stacks)
        prefix = stored.name.removesuffix("weight")
        parts = self.format.outputs(stored.name, stored.shape)
        outputs = tuple(TensorInfo.of(prefix + part, dtype, shape) for part, (shape, dtype) in parts.items())
        if self.row_multiple is None:
            return TensorPlan(stored, outputs, lambda rows: self._whole(rows, stored, prefix))
        return TensorPlan(stored, outputs, lambda rows: self._by_rows(rows, stored, prefix))

    def config(self, source: HfSource) -> dict[str, Any]:
        """Return the source's config with the quantization config of the result."""
        stacks = _stacks_of(source)
        names = [part for name in source.tensors for part in tensors_in(name, stacks)]
        return {**source.config, "quantization_config": self.quantization_config(names)}

    def _chooses(self, stored: StoredTensor, stacks: Mapping[str, Stack]) -> bool:
        if stored.name in stacks:
            return self.is_quantized(expert_names(stored.name, 0)[0], stored.shape[1:])
        return self.is_quantized(stored.name, stored.shape)

    def _plan_stack(self, stored: StoredTensor, stacks: Mapping[str, Stack]) -> TensorPlan:
        """Give every expert its own tensors: quantized weights have no stacked form."""
        stack, num_parts = stacks[stored.name], len(expert_names(stored.name, 0))
        num_rows, num_columns = reversed(stored.shape[1:]) if stack.is_transposed else stored.shape[1:]
        shape = (num_rows // num_parts, num_columns)
        outputs = [
            TensorInfo.of(f"{name.removesuffix('weight')}{part}", dtype, size)
            for name in tensors_in(stored.name, stacks)
            for part, (size, dtype) in self.format.outputs(name, shape).items()
        ]

        def convert(rows: RowReader) -> Iterator[OutputRows]:
            for expert in range(stack.num_experts):
                weights = stack.matrices(rows.read(stored, expert, 1)[0]).contiguous().chunk(num_parts)
                for name, weight in zip(expert_names(stored.name, expert), weights, strict=True):
                    for part, tensor in self.format.quantize(name, weight, check_finite=True).items():
                        yield f"{name.removesuffix('weight')}{part}", 0, tensor

        return TensorPlan(stored, tuple(outputs), convert)

    def _whole(self, rows: RowReader, stored: StoredTensor, prefix: str) -> Iterator[OutputRows]:
        parts = self.format.quantize(stored.name, rows.read(stored), check_finite=True)
        yield from ((prefix + part, 0, tensor) for part, tensor in parts.items())

    def _by_rows(self, rows: RowReader, stored: StoredTensor, prefix: str) -> Iterator[OutputRows]:
        multiple = self.row_multiple or 1
        # Rows that each part has for so many rows of the weight.
        per_multiple = {
            part: shape[0]
            for part, (shape, _) in self.format.outputs(stored.name, (multiple, *stored.shape[1:])).items()
        }
        for first, weight in rows.chunks(stored, multiple):
            for part, tensor in self.format.quantize(stored.name, weight, check_finite=True).items():
                if part != SHAPE_PART:
                    yield prefix + part, first // multiple * per_multiple[part], tensor
        if SHAPE_PART in per_multiple:
            yield prefix + SHAPE_PART, 0, torch.tensor(stored.shape, dtype=torch.int32)


def _stacks_of(source: HfSource) -> dict[str, Stack]:
    return find_stacks({name: stored.shape for name, stored in source.tensors.items()})


def require_plain(source: HfSource) -> None:
    """Refuse a checkpoint that is quantized already.

    Raises:
        ConfigError: naming its method.
    """
    found = source.quantization_config
    if found:
        raise ConfigError(
            f"{source.folder} is quantized already ({found.get('quant_method', 'by an unnamed method')}); give the "
            "unquantized model, or make one with tools/fp8_cast_bf16.py"
        )


STRATEGIES = ("block", "channel", "tensor")
BLOCK_SIDES = tuple(2**power for power in range(4, 10))
"""Tile sizes of the engines' kernels."""
UE8M0 = "ue8m0"
NUMBERS_PER_WORD = 8
PLAIN_IN_INT4 = {
    r"re:.*\.self_attn\.(fused_qkv_a_proj_with_mqa|q_a_proj|kv_a_proj_with_mqa|kv_b_proj)$": "latent attention: the "
    "engine looks at the dtype of the first three, which it joins, and takes the last apart",
    r"re:.*\.shared_experts\.": "the engine looks at their dtype",
}
"""Rule that is always there -> why SGLang cannot take these weights in packed integers."""

JOINED_BY_THE_ENGINE = (".q_a_proj.weight", ".kv_a_proj_with_mqa.weight")
"""SGLang makes one matrix of the two, which has a place for only one scale per tensor; so these stay plain."""
JOINED = "fused_qkv_a_proj_with_mqa"


def to_fp8(
    strategy: str = "block",
    block_size: Sequence[int] | None = None,
    scale_fmt: str | None = None,
    *,
    plain: PlainWeights | None = None,
) -> ToQuantized:
    """Quantize weights to FP8; the engine quantizes activations as they come.

    Args:
        strategy: what shares a scale: ``block``, ``channel`` (a row) or ``tensor``.
        block_size: rows and columns of a block; None is 128 x 128.
        scale_fmt: ``ue8m0`` makes the scales powers of two.
        plain: of the model's family.

    Raises:
        ConfigError: flags that do not go together, or a block that no engine can use.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"--strategy is {strategy!r}; use one of {', '.join(STRATEGIES)}")
    if scale_fmt not in (None, UE8M0):
        raise ConfigError(f"--scale-fmt is {scale_fmt!r}; {UE8M0} is the only format, leave it out for fp32 scales")
    if strategy != "block":
        for flag, value in (("--block-size", block_size), ("--scale-fmt", scale_fmt)):
            if value is not None:
                raise ConfigError(f"{flag} is for --strategy block; leave it out with --strategy {strategy}")
    settings = {"to": "fp8", "strategy": strategy}
    is_quantized = partial(is_quantized_offline, plain=plain)
    if strategy == "channel":
        return ToQuantized(ChannelFp8(), 1, is_quantized, lambda names: _channel_config(names, plain), settings)
    if strategy == "tensor":
        # Null and not absent: transformers takes 128 x 128 where nothing is said.
        return ToQuantized(
            TensorFp8(),
            None,
            lambda name, shape: is_quantized(name, shape) and not name.endswith(JOINED_BY_THE_ENGINE),
            lambda names: _fp8_config(names, plain, _joined_modules(names), weight_block_size=None),
            settings,
        )
    block = _checked_block(DEFAULT_BLOCK if block_size is None else block_size)
    more: dict[str, Any] = {"weight_block_size": list(block)}
    if scale_fmt is not None:
        more["scale_fmt"] = scale_fmt
    return ToQuantized(
        BlockFp8(block, ue8m0=scale_fmt == UE8M0),
        block[0],
        is_quantized,
        lambda names: _fp8_config(names, plain, **more),
        {**settings, **more},
    )


def to_int4(
    group_size: int = 32,
    is_symmetric: bool = True,
    ignore_rules: Sequence[str] = (),
    scale_dtype: torch.dtype = torch.bfloat16,
    *,
    plain: PlainWeights | None = None,
) -> ToQuantized:
    """Round to nearest four-bit integers, in compressed-tensors' packed form.

    Args:
        ignore_rules: modules that stay as they are: ``re:`` and a regular expression, a name, or the front part of
            names.
        scale_dtype: in which engines hold the unquantized weights of this model.
        plain: of the model's family.

    Raises:
        ConfigError: a group size or a rule that cannot work.
    """
    if group_size < NUMBERS_PER_WORD or group_size % NUMBERS_PER_WORD:
        raise ConfigError(
            f"--group-size is {group_size}; it must be a multiple of {NUMBERS_PER_WORD}, engines take 32 or 128"
        )
    for rule in ignore_rules:
        if rule.startswith("re:"):
            try:
                re.compile(rule[3:])
            except re.error as error:
                raise ConfigError(f"--ignore-rules {rule!r} is no regular expression: {error}") from error

    rules = (*ignore_rules, *PLAIN_IN_INT4)

    def is_quantized(name: str, shape: tuple[int, ...]) -> bool:
        return is_quantized_offline(name, shape, plain) and not is_ignored(name.removesuffix(SUFFIX), rules)

    def config(names: Collection[str]) -> dict[str, Any]:
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size}
        weights |= {"symmetric": is_symmetric, "dynamic": False}
        return _compressed_config("pack-quantized", ignored_by_int4(names, ignore_rules, plain), weights, None)

    return ToQuantized(
        GroupInt(num_bits=4, group_size=group_size, is_symmetric=is_symmetric, scale_dtype=scale_dtype),
        NUMBERS_PER_WORD,
        is_quantized,
        config,
        {"to": "int4", "group_size": group_size, "symmetric": is_symmetric, "ignore": list(ignore_rules)},
    )


def ignored_by_int4(
    names: Collection[str], ignore_rules: Sequence[str] = (), plain: PlainWeights | None = None
) -> list[str]:
    """Return the plain modules that a config of packed integers lists.

    Regular expressions stay what they are: they are meant for the modules into which engines join these, too.

    Args:
        ignore_rules: as :func:`to_int4` has them.
        plain: of the model's family.
    """
    rules = (*ignore_rules, *PLAIN_IN_INT4)
    modules = [name.removesuffix(SUFFIX) for name in names if is_quantized_offline(name, plain=plain)]
    patterns = [rule for rule in rules if rule.startswith("re:") and any(is_ignored(m, (rule,)) for m in modules)]
    named = [module for module in modules if is_ignored(module, rules) and not is_ignored(module, patterns)]
    return [*patterns, *sorted({*named, *modules_to_not_convert(names, plain)})]


def is_ignored(module: str, rules: Sequence[str]) -> bool:
    """Return True when a rule matches the module: ``re:`` and a regular expression, a name, or a prefix of names."""
    return any(
        re.match(rule[3:], module) if rule.startswith("re:") else f"{module}.".startswith(f"{rule}.") for rule in rules
    )


def _checked_block(block: Sequence[int]) -> tuple[int, int]:
    if len(block) != 2 or any(side not in BLOCK_SIDES for side in block):
        raise ConfigError(
            f"--block-size is {' '.join(map(str, block))}; give rows and columns, each one of "
            f"{', '.join(map(str, BLOCK_SIDES))}; engines support 128 128"
        )
    return block[0], block[1]


def _joined_modules(names: Collection[str]) -> list[str]:
    """Return the modules of :data:`JOINED_BY_THE_ENGINE`, and the engine's name for them together."""
    modules = {name.removesuffix(SUFFIX) for name in names if name.endswith(JOINED_BY_THE_ENGINE)}
    return sorted(modules | {f"{module.rpartition('.')[0]}.{JOINED}" for module in modules})


def _fp8_config(
    names: Collection[str], plain: PlainWeights | None, others: Collection[str] = (), **more: Any
) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        **more,
        "modules_to_not_convert": sorted({*modules_to_not_convert(names, plain), *others}),
    }


def _channel_config(names: Collection[str], plain: PlainWeights | None) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    return _compressed_config("float-quantized", modules_to_not_convert(names, plain), weights, activations)


def _compressed_config(
    layout: str, ignored: list[str], weights: dict[str, Any], activations: dict[str, Any] | None
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ignored,
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }
