"""gpt-oss (20B, 120B): sinks and windows in attention, YaRN, biases everywhere, experts with a clamped gate.

Options of megatron-core describe all of it; it has no special layers.  Folders and engines hold the experts of a
layer in one tensor [E, in, out], with gate and up interleaved.  Published folders pack it as MXFP4, which can be read
but not pushed.

Shapes: E = experts, h = hidden size, f = width of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from slime.backends.megatron_utils.models.family import ModelFamily
from slime.backends.megatron_utils.models.flag_rules import Config, Flag, choices, expert_layers
from slime.backends.megatron_utils.models.rule import Rule, WeightMap
from slime.train_data.model_dims import ModelDims
from slime_plugins.models.shared_flags import windows
from slime_plugins.models.shared_weights import ATTENTION, NORMS, TOP, relaid_rule


def halves_joined(turns: Tensor, shape: ModelDims) -> Tensor:
    """Map [h, 2 f] or [2 f] with interleaved gate and up to [2 f, h] or [2 f] with the gate first."""
    rows = turns.t()
    return torch.cat([rows[::2], rows[1::2]])


def halves_in_turn(joined: Tensor, shape: ModelDims) -> Tensor:
    """Invert :func:`halves_joined`."""
    return torch.stack(joined.chunk(2), dim=1).flatten(0, 1).t()


def transposed(matrix: Tensor, shape: ModelDims) -> Tensor:
    """Map [f, h] to [h, f], and back."""
    return matrix.t()


ATTENTION_EXTRAS = (
    Rule("self_attention.linear_proj.bias", ("self_attn.o_proj.bias",)),
    Rule("self_attention.core_attention.softmax_offset", ("self_attn.sinks",)),
)
EXPERTS = (
    Rule("mlp.router.weight", ("mlp.router.weight",)),
    Rule("mlp.router.bias", ("mlp.router.bias",)),
    *(
        relaid_rule(
            f"mlp.experts.linear_fc1.{kind}{{expert}}",
            f"mlp.experts.gate_up_proj{ending}[{{expert}}]",
            halves_joined,
            halves_in_turn,
        )
        for kind, ending in (("weight", ""), ("bias", "_bias"))
    ),
    relaid_rule("mlp.experts.linear_fc2.weight{expert}", "mlp.experts.down_proj[{expert}]", transposed, transposed),
    Rule("mlp.experts.linear_fc2.bias{expert}", ("mlp.experts.down_proj_bias[{expert}]",)),
)

GPT_OSS = WeightMap(
    family="gpt-oss",
    top=TOP,
    layer=(*NORMS, *ATTENTION, *ATTENTION_EXTRAS, *EXPERTS),
    computed_in_fp32=(".softmax_offset",),
)

WINDOW = 128
"""``sliding_window`` of the published models: keys that a query sees in every other layer, including its own."""


def gpt_oss_flags(config: Config) -> Iterator[Flag | str]:
    """Yield windows, and the gate of the experts."""
    limit = config["swiglu_limit"]
    yield from windows(config, 2)
    yield Flag("activation_func_clamp_value", limit, f"this model has {limit}")
    yield from expert_layers(config)
    yield from choices({"expert_tensor_parallel_size": 1})


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
        always={
            **{"swiglu": False, "quick_geglu": True, "glu_linear_offset": 1.0, "add_bias_linear": True},
            **{"softmax_type": "learnable", "moe_router_score_function": "softmax", "moe_router_pre_softmax": False},
        },
        defaults={"swiglu_limit": 7.0},
        flags=gpt_oss_flags,
        sizes={
            "num_local_experts": "num_experts",
            "num_experts_per_tok": "moe_router_topk",
            "intermediate_size": "moe_ffn_hidden_size",
        },
        num_experts_key="num_local_experts",
        # SGLang passes this model's routing to Triton's grouped kernels, which bypass its recorder.
        engine_hides_experts=True,
        published={
            name: _PUBLISHED for name in ("gpt-oss-20b", "gpt-oss-20b-bf16", "gpt-oss-120b", "gpt-oss-120b-bf16")
        },
    ),
)
