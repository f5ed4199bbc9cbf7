"""Each Megatron flag of the recipes sets what it names: the field of a config, or the attribute its reader looks at.

The table has the Megatron flags of slime's model and run scripts.  ``model`` and ``optimizer`` rows go all the way to
megatron-core's config objects; ``args`` rows are flags that slime's own modules read.
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
LATENT = f"{BASE} --disable-bias-linear --normalization RMSNorm --multi-latent-attention --q-lora-rank 8"
LATENT += " --kv-lora-rank 8 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16"

MODEL = [
    ("--num-layers 6", "num_layers", 6),
    ("--hidden-size 32", "hidden_size", 32),
    ("--ffn-hidden-size 72", "ffn_hidden_size", 72),
    ("--num-attention-heads 8", "num_attention_heads", 8),
    ("--group-query-attention --num-query-groups 2", "num_query_groups", 2),
    ("--kv-channels 24", "kv_channels", 24),
    ("--add-qkv-bias", "add_qkv_bias", True),
    ("--apply-layernorm-1p", "layernorm_zero_centered_gamma", True),
    ("--attention-dropout 0.0", "attention_dropout", 0.0),
    ("--hidden-dropout 0.3", "hidden_dropout", 0.3),
    ("--attention-output-gate", "attention_output_gate", True),
    ("--use-gated-attention", "attention_output_gate", True),
    ("--attention-softmax-in-fp32", "attention_softmax_in_fp32", True),
    ("--bf16", "bf16", True),
    ("--bf16", "params_dtype", torch.bfloat16),
    ("--calculate-per-token-loss", "calculate_per_token_loss", True),
    ("--disable-bias-linear", "add_bias_linear", False),
    ("--norm-epsilon 1e-6", "layernorm_epsilon", 1e-6),
    ("--normalization RMSNorm", "normalization", "RMSNorm"),
    ("--qk-layernorm", "qk_layernorm", True),
    ("--rotary-interleaved", "rotary_interleaved", True),
    ("--swiglu", "gated_linear_unit", True),
    ("--swiglu", "activation_func", F.silu),
    ("--no-rope-fusion", "apply_rope_fusion", False),
    ("--no-gradient-accumulation-fusion", "gradient_accumulation_fusion", False),
    ("--no-masked-softmax-fusion", "masked_softmax_fusion", False),
    ("--deterministic-mode", "deterministic_mode", True),
    (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        "recompute_num_layers",
        2,
    ),
    ("--recompute-granularity selective", "recompute_granularity", "selective"),
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
    ("--moe-ffn-hidden-size 48", "moe_ffn_hidden_size", 48),
    ("--moe-layer-freq [0]*1+[1]*3", "moe_layer_freq", [0, 1, 1, 1]),
    ("--moe-layer-freq ([0]+[1])*2", "moe_layer_freq", [0, 1, 0, 1]),
    ("--moe-layer-freq 2", "moe_layer_freq", 2),
    ("--moe-shared-expert-intermediate-size 40", "moe_shared_expert_intermediate_size", 40),
    ("--moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate", "moe_shared_expert_gate", True),
    ("--moe-router-topk 3", "moe_router_topk", 3),
    ("--moe-router-topk-scaling-factor 2.5 --moe-router-pre-softmax", "moe_router_topk_scaling_factor", 2.5),
    ("--moe-router-pre-softmax", "moe_router_pre_softmax", True),
    ("--moe-router-score-function sigmoid", "moe_router_score_function", "sigmoid"),
    ("--moe-router-dtype fp32", "moe_router_dtype", "fp32"),
    ("--moe-router-load-balancing-type seq_aux_loss", "moe_router_load_balancing_type", "seq_aux_loss"),
    ("--moe-aux-loss-coeff 0.25", "moe_aux_loss_coeff", 0.25),
    (
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        "moe_router_enable_expert_bias",
        True,
    ),
    ("--moe-router-bias-update-rate 0", "moe_router_bias_update_rate", 0.0),
    ("--moe-router-num-groups 2 --moe-router-group-topk 1", "moe_router_group_topk", 1),
    ("--moe-token-drop-policy probs", "moe_token_drop_policy", "probs"),
    ("--moe-token-dispatcher-type allgather", "moe_token_dispatcher_type", "alltoall"),
    ("--moe-enable-deepep --moe-token-dispatcher-type flex", "moe_token_dispatcher_type", "alltoall"),
    (
        "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep",
        "moe_token_dispatcher_type",
        "alltoall",
    ),
    ("--moe-permute-fusion", "moe_permute_fusion", False),
    ("--expert-model-parallel-size 2 --actor-num-gpus-per-node 2", "expert_model_parallel_size", 2),
    ("--expert-tensor-parallel-size 1", "expert_tensor_parallel_size", 1),
]
LATENT_ROWS = [
    ("--q-lora-rank 12", "q_lora_rank", 12),
    ("--kv-lora-rank 12", "kv_lora_rank", 12),
    ("--qk-head-dim 24", "qk_head_dim", 24),
    ("--qk-pos-emb-head-dim 16", "qk_pos_emb_head_dim", 16),
    ("--v-head-dim 24", "v_head_dim", 24),
    ("--mscale 0.9", "mscale", 0.9),
    ("--mscale-all-dim 0.8", "mscale_all_dim", 0.8),
    ("--rotary-base 50000", "rotary_base", 50000),
    ("--rotary-scaling-factor 32", "rotary_scaling_factor", 32.0),
    ("--rope-type rope", "rope_type", "rope"),
]
OPTIMIZER = [
    ("--lr 1e-6", "lr", 1e-6),
    ("--min-lr 1e-7", "min_lr", 1e-7),
    ("--adam-beta1 0.8", "adam_beta1", 0.8),
    ("--adam-beta2 0.98", "adam_beta2", 0.98),
    ("--weight-decay 0.1", "weight_decay", 0.1),
    ("--clip-grad 0.5", "clip_grad", 0.5),
    ("--optimizer adam", "optimizer", "adam"),
    ("--use-distributed-optimizer", "use_distributed_optimizer", True),
    ("--use-precision-aware-optimizer", "use_precision_aware_optimizer", False),
]
DDP = [
    ("--accumulate-allreduce-grads-in-fp32", "grad_reduce_in_fp32", True),
    ("--no-check-for-nan-in-loss-and-grad", "check_for_nan_in_grad", False),
    ("--overlap-grad-reduce", "overlap_grad_reduce", True),
]
ARGS = [
    ("--make-vocab-size-divisible-by 16", "padded_vocab_size", 112),
    ("--vocab-size 120", "vocab_size", 120),
    ("--max-position-embeddings 32768", "max_position_embeddings", 32768),
    ("--seq-length 8192", "seq_length", 8192),
    ("--position-embedding-type rope --no-position-embedding", "position_embedding_type", "rope"),
    ("--use-rotary-position-embeddings", "position_embedding_type", "rope"),
    ("--rotary-percent 0.5", "rotary_percent", 0.5),
    ("--use-rope-scaling --rope-scaling-factor 32", "rope_scaling_factor", 32.0),
    ("--untie-embeddings-and-output-weights", "untie_embeddings_and_output_weights", True),
    ("--post-self-attn-layernorm", "post_self_attn_layernorm", True),
    ("--post-mlp-layernorm", "post_mlp_layernorm", True),
    ("--enable-experimental", "enable_experimental", True),
    ("--spec slime_plugins.models.glm4 get_glm_spec", "spec", ["slime_plugins.models.glm4", "get_glm_spec"]),
    ("--lr-decay-style constant", "lr_decay_style", "constant"),
    ("--lr-warmup-fraction 0.1", "lr_warmup_fraction", 0.1),
    ("--transformer-impl transformer_engine", "transformer_impl", "local"),
    ("--attention-backend flash", "attention_backend", "flash"),
    ("--ckpt-step 3", "ckpt_step", 3),
]
ROWS = [
    *(("model", BASE, *row) for row in MODEL),
    *(("model", EXPERTS, *row) for row in EXPERT),
    *(("model", LATENT, *row) for row in LATENT_ROWS),
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
