"""Values derived from the trainer's flags, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.flags.check_arguments import check_arguments
from slime.backends.megatron_utils.flags.config_builders import (
    ddp_config_from_args,
    optimizer_config_from_args,
    transformer_config_from_args,
)
from slime.backends.megatron_utils.flags.hf_config_check import check_hf_config, read_hf_config
from slime.utils.errors import ConfigError
from tests.unit.backends.megatron_utils.megatron_case import build_parser, hf_flags, parse, write_hf_model
from tests.unit.scripts.test_model_files import model_args

DENSE = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 100 --swiglu".split()
QWEN3 = {
    **{"model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100},
    **{"num_key_value_heads": 4, "head_dim": 16},
}
MOE = [*DENSE, *"--num-experts 4 --moe-ffn-hidden-size 32 --disable-bias-linear".split()]

SCRIPT_FLAGS = """
accumulate-allreduce-grads-in-fp32 adam-beta1=0.9 adam-beta2=0.98 add-qkv-bias apply-layernorm-1p
attention-backend=flash attention-dropout=0.0 attention-output-gate attention-softmax-in-fp32 bf16 ckpt-step=3
context-parallel-size=1 deterministic-mode disable-bias-linear enable-experimental expert-model-parallel-size=1
expert-tensor-parallel-size=1 ffn-hidden-size=128 fp8-recipe=blockwise group-query-attention hidden-dropout=0.0
kv-channels=16 kv-lora-rank=8 lr-decay-style=constant lr-warmup-fraction=0.1 make-vocab-size-divisible-by=16
max-position-embeddings=32768 min-lr=1e-7 moe-aux-loss-coeff=0 moe-enable-deepep moe-grouped-gemm
moe-layer-freq=[1]*4 moe-permute-fusion moe-router-bias-update-rate=0 moe-router-dtype=fp32
moe-router-enable-expert-bias moe-router-group-topk=1 moe-router-load-balancing-type=none moe-router-num-groups=1
moe-router-pre-softmax moe-router-score-function=sigmoid moe-router-topk=2 moe-router-topk-scaling-factor=2.5
moe-shared-expert-gate moe-shared-expert-intermediate-size=32 moe-token-dispatcher-type=flex
moe-token-drop-policy=probs no-check-for-nan-in-loss-and-grad
no-gradient-accumulation-fusion no-load-optim no-masked-softmax-fusion no-position-embedding no-rope-fusion
norm-epsilon=1e-6 normalization=RMSNorm num-query-groups=2 optimizer=adam optimizer-cpu-offload
overlap-cpu-optimizer-d2h-h2d pipeline-model-parallel-size=1 position-embedding-type=rope post-mlp-layernorm
post-self-attn-layernorm q-lora-rank=8 qk-head-dim=16 qk-layernorm qk-pos-emb-head-dim=8 recompute-granularity=full
recompute-method=uniform recompute-num-layers=1 rotary-base=10000 rotary-interleaved rotary-percent=0.5
seq-length=4096 sequence-parallel swiglu tensor-model-parallel-size=1 transformer-impl=local
untie-embeddings-and-output-weights use-distributed-optimizer use-precision-aware-optimizer
use-rope-scaling use-rotary-position-embeddings v-head-dim=16 weight-decay=0.1
"""
"""Every Megatron flag in slime's model and run scripts that slime does not declare itself, except YaRN's."""

LATENT_FLAGS = """
multi-latent-attention q-lora-rank=8 kv-lora-rank=8 qk-head-dim=16 qk-pos-emb-head-dim=8 v-head-dim=16 mscale=1.0
mscale-all-dim=1.0 rotary-scaling-factor=40 rotary-base=10000
"""


def test_every_flag_of_the_scripts_makes_a_model_config() -> None:
    flags = [part for text in SCRIPT_FLAGS.split() for part in f"--{text}".split("=")]
    args = parse(*DENSE, "--num-experts", "4", "--moe-ffn-hidden-size", "32", *flags)
    assert transformer_config_from_args(args).moe_router_topk_scaling_factor == 2.5
    latent = [part for text in LATENT_FLAGS.split() for part in f"--{text}".split("=")]
    config = transformer_config_from_args(parse(*DENSE, *latent))
    assert (config.rope_type, config.rotary_scaling_factor, config.mscale_all_dim) == ("yarn", 40.0, 1.0)


def test_a_plain_dense_model_gets_megatrons_derived_sizes() -> None:
    args = parse(*DENSE)
    assert args.ffn_hidden_size == 128  # 4 * 64 * 2 / 3, rounded down to a multiple of 64
    assert (args.kv_channels, args.num_query_groups) == (16, 4)
    assert args.padded_vocab_size == 128
    assert (args.seq_length, args.max_position_embeddings) == (4096, 4096)
    assert args.use_distributed_optimizer and args.variable_seq_lengths
    config = transformer_config_from_args(args)
    assert config.activation_func is torch.nn.functional.silu and config.gated_linear_unit
    assert config.variable_seq_lengths and config.hidden_dropout == 0.0


def test_the_vocabulary_is_padded_for_every_tensor_rank() -> None:
    args = parse(*DENSE, *"--tensor-model-parallel-size 2 --actor-num-gpus-per-node 2".split())
    assert args.padded_vocab_size == 256
    args = parse(*DENSE, *"--padded-vocab-size 104".split())
    assert args.padded_vocab_size == 104


def test_the_precision_follows_the_machine_unless_it_is_given() -> None:
    args = parse(*DENSE)
    is_cuda = torch.cuda.is_available()
    assert (args.bf16, args.fp16, args.fp32) == (is_cuda, False, not is_cuda)
    args = parse(*DENSE, "--bf16")
    assert args.params_dtype == torch.bfloat16 and args.accumulate_allreduce_grads_in_fp32
    assert parse(*DENSE, "--fp32").params_dtype == torch.float32


def test_optimizer_and_gradient_buffers_follow_their_flags() -> None:
    args = parse(*DENSE, *"--lr 1e-3 --adam-beta2 0.98 --weight-decay 0.1 --bf16 --clip-grad 0.5".split())
    optimizer = optimizer_config_from_args(args)
    assert (optimizer.lr, optimizer.adam_beta2, optimizer.weight_decay, optimizer.clip_grad) == (1e-3, 0.98, 0.1, 0.5)
    assert optimizer.bf16 and optimizer.params_dtype == torch.bfloat16 and optimizer.use_distributed_optimizer
    ddp = ddp_config_from_args(args)
    assert ddp.grad_reduce_in_fp32 and ddp.use_distributed_optimizer


def test_kernels_of_transformer_engine_are_mapped_to_what_there_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        args = parse(*MOE, *"--moe-grouped-gemm --moe-permute-fusion --use-precision-aware-optimizer".split())
    assert not (args.moe_permute_fusion or args.use_precision_aware_optimizer)
    assert args.moe_grouped_gemm  # torch has a grouped product
    for word in ("--moe-permute-fusion", "--use-precision-aware-optimizer"):
        assert sum(word in record.message for record in caplog.records) == 1
    assert "moments are fp32 unless --exp-avg-dtype or --exp-avg-sq-dtype is given" in caplog.text


def test_narrow_moments_keep_their_flags() -> None:
    args = parse(*DENSE, "--bf16", *"--use-precision-aware-optimizer --exp-avg-sq-dtype fp16".split())
    assert args.use_precision_aware_optimizer and args.exp_avg_sq_dtype == torch.float16
    assert not optimizer_config_from_args(
        args
    ).use_precision_aware_optimizer  # megatron-core's needs TransformerEngine


def test_the_precision_aware_optimizer_has_its_effect_with_adam_on_the_host(caplog: pytest.LogCaptureFixture) -> None:
    """Master weights are only on the host, which is what megatron-core means by that flag."""
    with caplog.at_level("INFO"):
        args = parse(*DENSE, "--bf16", "--optimizer-cpu-offload", "--use-precision-aware-optimizer")
    assert "--use-precision-aware-optimizer" not in caplog.text
    args.optimizer_cpu_offload = True  # turned off without CUDA
    assert optimizer_config_from_args(args).use_precision_aware_optimizer


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--tensor-model-parallel-size 2", False),
        ("--tensor-model-parallel-size 2 --sequence-parallel", True),
        ("--tensor-model-parallel-size 2 --num-experts 4", True),
        ("--tensor-model-parallel-size 2 --multi-latent-attention", True),
        ("--sequence-parallel", False),
    ],
)
def test_sequence_parallelism_is_on_where_tensor_parallelism_needs_it(flags: str, expected: bool) -> None:
    args = parse(*DENSE, "--disable-bias-linear", "--actor-num-gpus-per-node", "2", *flags.split())
    assert args.sequence_parallel is expected


LARGE_LAYOUTS = {
    "glm4.5-355B-A32B": (8, "8 4 2 16", ""),
    "deepseek-v3": (16, "8 4 4 32", "--decoder-last-pipeline-num-layers 13"),
    "glm5.2-744B-A40B": (
        *(32, "4 8 8 32"),
        "--decoder-first-pipeline-num-layers 14 --decoder-last-pipeline-num-layers 16",
    ),
    "glm4.7-30B-A3B": (1, "1 1 1 8", ""),
}
"""Large recipes: model file -> nodes of eight GPUs, tensor, pipeline, context and expert sizes, further flags."""


@pytest.mark.parametrize("name", LARGE_LAYOUTS)
def test_the_layouts_of_the_large_recipes_fit_megatron_core(name: str) -> None:
    nodes, sizes, more = LARGE_LAYOUTS[name]
    tensor, pipeline, context, expert = sizes.split()
    flags = model_args(name)
    if "--spec" in flags:
        del flags[flags.index("--spec") : flags.index("--spec") + 3]
    flags += f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}".split()
    flags += f"--context-parallel-size {context} --expert-model-parallel-size {expert}".split()
    flags += "--expert-tensor-parallel-size 1 --optimizer-cpu-offload --use-precision-aware-optimizer".split()
    flags += "--moe-enable-deepep --moe-token-dispatcher-type flex --overlap-cpu-optimizer-d2h-h2d".split()
    args = parse(*flags, *more.split(), "--actor-num-nodes", nodes, "--actor-num-gpus-per-node", 8)
    assert transformer_config_from_args(args).pipeline_model_parallel_size == int(pipeline)


def test_virtual_stages_follow_from_the_layers_of_one() -> None:
    layout = "--pipeline-model-parallel-size 2 --actor-num-gpus-per-node 2"
    args = parse(*DENSE, *layout.split(), "--num-layers-per-virtual-pipeline-stage", "1")
    assert args.virtual_pipeline_model_parallel_size == 2
    assert parse(*DENSE, *layout.split()).virtual_pipeline_model_parallel_size is None
    args = parse(*DENSE, *layout.split(), "--pipeline-model-parallel-layout", "Et|t|t|tL")
    assert args.virtual_pipeline_model_parallel_size == 2
    assert args.overlap_p2p_comm and not transformer_config_from_args(args).batch_p2p_comm


def test_a_shared_expert_of_width_0_is_none() -> None:
    """As in config.json of Qwen3-Coder."""
    experts = "--num-experts 2 --moe-ffn-hidden-size 8 --moe-shared-expert-intermediate-size 0"
    assert transformer_config_from_args(parse(*DENSE, *experts.split())).moe_shared_expert_intermediate_size is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-query-groups 2", "without --group-query-attention"),
        ("--group-query-attention --num-query-groups 3", "--num-query-groups is 3.*divide --num-attention-heads 4"),
        ("--attention-dropout 0.1", "--attention-dropout is 0.1"),
        ("--fp8-format e4m3", "--fp8-recipe delayed; .* --fp8-format e4m3 --fp8-recipe blockwise"),
        ("--fp8-format hybrid --fp8-recipe blockwise", "--fp8-format is hybrid"),
        (
            "--actor-num-gpus-per-node 4 --tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2 "
            "--fp8-format e4m3 --fp8-recipe blockwise",
            "--tensor-model-parallel-size 2 or less",
        ),
        ("--linear-attention-freq 4", "--linear-attention-freq is 4 without --spec"),
        ("--linear-key-head-dim 64", "--linear-key-head-dim without --linear-attention-freq"),
        ("--lr-warmup-iters 8 --lr-decay-iters 8", "warms up for 8 of 8 optimizer steps"),
        (
            "--actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2 --mtp-num-layers 1 "
            "--pipeline-model-parallel-layout Ettttm|L",
            "must be in the last stage",
        ),
        ("--num-layers 0", "--num-layers is 0"),
        ("--hf-checkpoint /no/such/folder", "/no/such/folder"),
        (
            "--actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2 --account-for-loss-in-pipeline-split",
            "5 layers .* 2 pipeline stages",
        ),
        (
            "--actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
            "--microbatch-group-size-per-vp-stage 1",
            "must be at least --pipeline-model-parallel-size 2",
        ),
        (
            "--actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|t|tL",
            "has 3 stages; --pipeline-model-parallel-size 2 must divide that",
        ),
    ],
)
def test_an_impossible_combination_is_refused_by_name(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*DENSE, *flags.split())


def test_a_debug_rollout_needs_no_model_flags() -> None:
    assert parse("--debug-rollout-only").num_layers == 0


def test_model_flags_that_fit_the_checkpoint_pass(tmp_path: Path) -> None:
    write_hf_model(tmp_path, "qwen3")
    assert parse(*hf_flags(tmp_path)).vocab_size == 131


def test_all_disagreements_with_the_checkpoint_are_listed_at_once(tmp_path: Path) -> None:
    write_hf_model(tmp_path, "qwen3")
    wrong = "--num-layers 4 --ffn-hidden-size 96 --rotary-base 500000 --norm-epsilon 1e-5 --num-query-groups 3"
    with pytest.raises(ConfigError) as caught:
        parse(*hf_flags(tmp_path), *wrong.split(), "--no-qk-layernorm")
    for part in (
        "--num-layers is 4; num_hidden_layers is 3",
        "--ffn-hidden-size is 96; intermediate_size is 80",
        "--rotary-base is 500000.0; rope_theta is 10000.0",
        "--norm-epsilon is 1e-05; rms_norm_eps is 1e-06",
        "--num-query-groups is 3; num_key_value_heads is 2",
        "--qk-layernorm is not given; a qwen3 has it",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [{"rope_theta": 9.0}, {"rope_parameters": {"rope_theta": 9.0}}, {"text_config": {"rope_theta": 9.0}}],
    ids=["old", "new", "multimodal"],
)
def test_the_rotary_base_is_found_in_configs_of_every_age(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "acme", **config}))
    with pytest.raises(ConfigError, match="--rotary-base is 10000.0; rope_theta is 9.0"):
        parse(*DENSE, "--rotary-base", "10000", "--hf-checkpoint", str(tmp_path))


def test_what_the_checkpoint_of_an_unknown_family_does_not_say_is_not_compared(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "acme"}')
    assert parse(*DENSE, "--hf-checkpoint", str(tmp_path)).hidden_size == 64


def test_the_dense_size_of_a_model_of_experts_alone_is_not_compared(tmp_path: Path) -> None:
    config: dict[str, Any] = {"model_type": "acme"}
    config |= {"intermediate_size": 5, "moe_intermediate_size": 32, "num_experts": 4, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = [*MOE, "--hf-checkpoint", tmp_path, "--num-experts", "4", "--num-layers", "4", "--ffn-hidden-size", "64"]
    assert parse(*flags).ffn_hidden_size == 64
    (tmp_path / "config.json").write_text(json.dumps({**config, "mlp_only_layers": [0]}))
    with pytest.raises(ConfigError, match="--ffn-hidden-size is 64; intermediate_size is 5"):
        parse(*flags, "--moe-layer-freq", "[0]+[1]*3")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**QWEN3, "quantization_config": {"quant_method": "gptq"}}, "is quantized .gptq."),
        (
            {**QWEN3, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "not a folder with safetensors",
        ),
    ],
)
def test_weights_that_could_not_be_pushed_are_refused_when_flags_are_read(
    tmp_path: Path, config: dict[str, object], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = parse(*DENSE, "--hf-checkpoint", str(tmp_path))  # a tool, which does not push
    args.debug_train_only, args.model_name = False, None
    with pytest.raises(ConfigError, match=message):
        check_hf_config(args)
    args.debug_train_only = True
    check_hf_config(args)


def test_a_warm_up_longer_than_the_run_is_refused_when_flags_are_read() -> None:
    args = parse(*DENSE, "--lr-warmup-iters", "4")
    args.num_rollout, args.rollout_batch_size, args.n_samples_per_prompt, args.global_batch_size = 2, 4, 2, 4
    with pytest.raises(ConfigError, match="warms up for 4 of 4 optimizer steps"):
        check_arguments(args)
    args.num_rollout = 3
    check_arguments(args)
    args.num_rollout, args.num_epoch = None, 1  # the run's length is known later
    check_arguments(args)


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json is not JSON"):
        read_hf_config(str(tmp_path))


@pytest.mark.parametrize("name", ["qwen2.5-0.5B", "qwen3-4B", "qwen3-30B-A3B", "llama3.2-1B-Instruct", "deepseek-v3"])
def test_a_model_file_gives_a_config_of_megatron_core(name: str) -> None:
    args = parse(*model_args(name))
    assert transformer_config_from_args(args).num_layers == args.num_layers


def test_a_rotary_base_from_outside_wins_where_the_file_allows_it() -> None:
    args = build_parser().parse_args(model_args("qwen3-4B-Instruct-2507"))
    assert args.rotary_base == 5_000_000
