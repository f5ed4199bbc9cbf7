"""Flags of the recipes whose names or values differ from the fields of megatron-core's configs that they set.

Other flags come from those fields.  ``args`` rows are flags that slime's own modules read.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from slime.backends.megatron_utils.flags.config_builders import (
    ddp_config_from_args,
    optimizer_config_from_args,
    transformer_config_from_args,
)
from tests.unit.backends.megatron_utils.megatron_case import parse

BASE = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 100 --ffn-hidden-size 96 --swiglu"
EXPERTS = f"{BASE} --disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 32"

MODEL = [
    ("--group-query-attention --num-query-groups 2", "num_query_groups", 2),
    ("--apply-layernorm-1p", "layernorm_zero_centered_gamma", True),
    ("--use-gated-attention", "attention_output_gate", True),
    ("--bf16", "params_dtype", torch.bfloat16),
    ("--disable-bias-linear", "add_bias_linear", False),
    ("--norm-epsilon 1e-6", "layernorm_epsilon", 1e-6),
    ("--swiglu", "gated_linear_unit", True),
    ("--swiglu", "activation_func", F.silu),
    ("--no-rope-fusion", "apply_rope_fusion", False),
    ("--no-gradient-accumulation-fusion", "gradient_accumulation_fusion", False),
    ("--no-masked-softmax-fusion", "masked_softmax_fusion", False),
    (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        "recompute_num_layers",
        2,
    ),
    ("--recompute-activations", "recompute_granularity", "selective"),
    ("--tensor-model-parallel-size 2 --actor-num-gpus-per-node 2", "tensor_model_parallel_size", 2),
    ("--tensor-model-parallel-size 2 --sequence-parallel --actor-num-gpus-per-node 2", "sequence_parallel", True),
    ("--context-parallel-size 2 --actor-num-gpus-per-node 2", "context_parallel_size", 2),
    ("--pipeline-model-parallel-size 2 --actor-num-gpus-per-node 2", "pipeline_model_parallel_size", 2),
    (
        "--pipeline-model-parallel-size 2 --actor-num-gpus-per-node 2 --decoder-first-pipeline-num-layers 1",
        "num_layers_in_first_pipeline_stage",
        1,
    ),
    (
        "--pipeline-model-parallel-size 2 --actor-num-gpus-per-node 2 --decoder-last-pipeline-num-layers 3",
        "num_layers_in_last_pipeline_stage",
        3,
    ),
    (
        "--pipeline-model-parallel-size 2 --actor-num-gpus-per-node 2 --num-layers-per-virtual-pipeline-stage 1",
        "virtual_pipeline_model_parallel_size",
        2,
    ),
]
EXPERT = [
    ("--num-experts 8", "num_moe_experts", 8),
    ("--moe-layer-freq [0]*1+[1]*3", "moe_layer_freq", [0, 1, 1, 1]),
    ("--moe-layer-freq ([0]+[1])*2", "moe_layer_freq", [0, 1, 0, 1]),
    ("--moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate", "moe_shared_expert_gate", True),
    ("--moe-router-topk-scaling-factor 2.5 --moe-router-pre-softmax", "moe_router_topk_scaling_factor", 2.5),
    (
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        "moe_router_enable_expert_bias",
        True,
    ),
    ("--moe-router-num-groups 2 --moe-router-group-topk 1", "moe_router_group_topk", 1),
    ("--moe-token-dispatcher-type allgather", "moe_token_dispatcher_type", "alltoall"),
    ("--moe-enable-deepep --moe-token-dispatcher-type flex", "moe_token_dispatcher_type", "alltoall"),
    (
        "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep",
        "moe_token_dispatcher_type",
        "alltoall",
    ),
    ("--moe-permute-fusion", "moe_permute_fusion", False),
    ("--expert-model-parallel-size 2 --actor-num-gpus-per-node 2", "expert_model_parallel_size", 2),
]
OPTIMIZER = [
    ("--use-precision-aware-optimizer", "use_precision_aware_optimizer", False),
]
DDP = [
    ("--accumulate-allreduce-grads-in-fp32", "grad_reduce_in_fp32", True),
    ("--no-check-for-nan-in-loss-and-grad", "check_for_nan_in_grad", False),
]
ARGS = [
    ("--make-vocab-size-divisible-by 16", "padded_vocab_size", 112),
    ("--position-embedding-type rope --no-position-embedding", "position_embedding_type", "rope"),
    ("--use-rotary-position-embeddings", "position_embedding_type", "rope"),
    ("--use-rope-scaling --rope-scaling-factor 32", "rope_scaling_factor", 32.0),
    ("--spec slime_plugins.models.glm4 get_glm_spec", "spec", ["slime_plugins.models.glm4", "get_glm_spec"]),
    ("--transformer-impl transformer_engine", "transformer_impl", "local"),
]
ROWS = [
    *(("model", BASE, *row) for row in MODEL),
    *(("model", EXPERTS, *row) for row in EXPERT),
    *(("optimizer", BASE, *row) for row in OPTIMIZER),
    *(("ddp", BASE, *row) for row in DDP),
    *(("args", BASE, *row) for row in ARGS),
]


@pytest.mark.parametrize(("target", "base", "flags", "name", "value"), ROWS, ids=lambda v: v if v != BASE else "")
def test_a_flag_of_the_recipes_sets_what_it_names(
    target: str, base: str, flags: str, name: str, value: object
) -> None:
    args = parse(*base.split(), *flags.split())
    holder = {
        "model": transformer_config_from_args,
        "optimizer": optimizer_config_from_args,
        "ddp": ddp_config_from_args,
        "args": lambda args: args,
    }[target](args)
    assert getattr(holder, name) == value


def test_fp16_lets_gradients_overflow_until_the_loss_scale_fits() -> None:
    args = parse(*BASE.split())
    assert ddp_config_from_args(args).check_for_nan_in_grad
    args.fp16 = True  # the flag needs CUDA
    assert not ddp_config_from_args(args).check_for_nan_in_grad
