"""gpt-oss (20B, 120B): sinks and windows in attention, YaRN, biases everywhere, experts with a clamped gate.

All of it is megatron-core's options; there are no layers of its own.  Folders and engines hold the experts of a layer
in one tensor, [E, in, out] with gate and up in turn; published ones pack it as MXFP4, which is read, not pushed.

Shapes: E = experts, h = hidden size, f = width of an expert.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.models.family import ModelFamily, differs
from slime.backends.megatron_utils.models.rule import Rule, WeightMap
from slime.backends.megatron_utils.models.shared_rules import ATTENTION, NORMS, TOP
from slime.train_data.model_dims import ModelDims


def halves_joined(tensors: Sequence[Tensor], shape: ModelDims) -> Tensor:
    """[h, 2 f] or [2 f], gate and up in turn, to [2 f, h] or [2 f] with the gate on top."""
    (turns,) = tensors
    rows = turns.t()
    return torch.cat([rows[::2], rows[1::2]])


def halves_in_turn(joined: Tensor, shape: ModelDims) -> Sequence[Tensor]:
    """Invert :func:`halves_joined`."""
    return (torch.stack(joined.chunk(2), dim=1).flatten(0, 1).t(),)


def transposed(tensors: Sequence[Tensor], shape: ModelDims) -> Tensor:
    """[f, h] to [h, f]."""
    return tensors[0].t()


ATTENTION_EXTRAS = (
    Rule("self_attention.linear_proj.bias", ("self_attn.o_proj.bias",)),
    Rule("self_attention.core_attention.softmax_offset", ("self_attn.sinks",)),
)
EXPERTS = (
    Rule("mlp.router.weight", ("mlp.router.weight",)),
    Rule("mlp.router.bias", ("mlp.router.bias",)),
    *(
        Rule(
            f"mlp.experts.linear_fc1.{kind}{{expert}}",
            (f"mlp.experts.gate_up_proj{ending}[{{expert}}]",),
            merge=halves_joined,
            split=halves_in_turn,
        )
        for kind, ending in (("weight", ""), ("bias", "_bias"))
    ),
    Rule(
        "mlp.experts.linear_fc2.weight{expert}",
        ("mlp.experts.down_proj[{expert}]",),
        merge=transposed,
        split=lambda tensor, shape: (tensor.t(),),
    ),
    Rule("mlp.experts.linear_fc2.bias{expert}", ("mlp.experts.down_proj_bias[{expert}]",)),
)

GPT_OSS = WeightMap(family="gpt-oss", top=TOP, layer=(*NORMS, *ATTENTION, *ATTENTION_EXTRAS, *EXPERTS))

WINDOW = 128
"""``sliding_window`` of the published models: keys that a query of every other layer sees, its own among them."""


def gpt_oss_mismatches(args: Namespace, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each flag that differs: sinks, windows, biases, the gate of the experts."""
    width = config["sliding_window"]
    types = config.get("layer_types") or []
    if any((kind == "full_attention") != bool(layer % 2) for layer, kind in enumerate(types)):
        yield "layer_types has no full attention in each 2nd layer alone; --window-attn-skip-freq 2 says that"
    if args.window_size is None or tuple(args.window_size) != (width - 1, 0) or args.window_attn_skip_freq != 2:
        yield (
            f"--window-size is {args.window_size} and --window-attn-skip-freq {args.window_attn_skip_freq}; "
            f"sliding_window is {width}, in each layer but every 2nd: {width - 1},0 and 2"
        )
    for flag, given, wanted in (
        ("--softmax-type", args.softmax_type, "learnable"),
        ("--glu-linear-offset", args.glu_linear_offset, 1.0),
        ("--activation-func-clamp-value", args.activation_func_clamp_value, config["swiglu_limit"]),
    ):
        if given is None or differs(wanted, given):
            yield f"{flag} is {given}; this model has {wanted}"
    if not args.quick_geglu:
        yield "--quick-geglu is not given; the experts of this model are gated by it"
    if not args.add_bias_linear:
        yield "--disable-bias-linear is given; attention, router and experts of this model have biases"
    if args.moe_router_pre_softmax:
        yield "--moe-router-pre-softmax is given; the weights of this model's chosen experts add up to 1"


_DEFAULTS: dict[str, Any] = {"sliding_window": WINDOW, "swiglu_limit": 7.0}


def _with_defaults(args: Namespace, config: Mapping[str, Any]) -> Iterator[str]:
    return gpt_oss_mismatches(args, {**_DEFAULTS, **config})


_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
_PUBLISHED = {"model_type": "gpt_oss", "sliding_window": WINDOW, "rope_scaling": _YARN}

FAMILIES = (
    ModelFamily(
        model_types=("gpt_oss",),
        weight_map=GPT_OSS,
        defaults=_DEFAULTS,
        mismatches=_with_defaults,
        sizes={
            "num_local_experts": "num_experts",
            "num_experts_per_tok": "moe_router_topk",
            "intermediate_size": "moe_ffn_hidden_size",
        },
        num_experts_key="num_local_experts",
        # SGLang hands the routing of this model to Triton's grouped kernels, past its recorder.
        engine_hides_experts=True,
        published={
            name: _PUBLISHED for name in ("gpt-oss-20b", "gpt-oss-20b-bf16", "gpt-oss-120b", "gpt-oss-120b-bf16")
        },
    ),
)
