"""Tiny models for the tests of the trainer: flags, HF reference models, one-process parallel state."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu
from megatron.core.packed_seq_params import PackedSeqParams

from slime.backends.megatron_utils.arguments import add_megatron_arguments, validate_megatron_arguments
from slime.backends.megatron_utils.initialize import init


def build_parser() -> argparse.ArgumentParser:
    """The trainer's flags, with those of slime's own that it reads."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for option, default in (
        ("--hf-checkpoint", None),
        ("--custom-model-provider-path", None),
        ("--custom-megatron-init-path", None),
        ("--load", None),
    ):
        parser.add_argument(option, default=default)
    for option in (
        "--enable-mtp-training",
        "--debug-rollout-only",
        "--allgather-cp",
        "--calculate-per-token-loss",
        "--fp32",
    ):
        parser.add_argument(option, action="store_true")
    for option, default in (
        ("--seed", 1234),
        ("--mtp-num-layers", None),
        ("--padded-vocab-size", None),
        ("--distributed-timeout-minutes", 2),
        ("--actor-num-nodes", 1),
        ("--actor-num-gpus-per-node", 1),
    ):
        parser.add_argument(option, type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--only-train-params-name-list", nargs="*")
    parser.add_argument("--freeze-params-name-list", nargs="*")
    add_megatron_arguments(parser)
    return parser


def parse(*flags: str) -> argparse.Namespace:
    """Complete args from flags; numbers may be given as such."""
    args = build_parser().parse_args([str(flag) for flag in flags])
    validate_megatron_arguments(args)
    return args


def start_single_process(args: argparse.Namespace) -> None:
    """A world of one rank, made once per test process, with parallel groups of size one."""
    if not dist.is_initialized():
        store = Path(tempfile.mkdtemp()) / f"store-{os.getpid()}"
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=f"file://{store}", world_size=1, rank=0)
    start_parallel(args)


def start_parallel(args: argparse.Namespace) -> None:
    """The parallel groups and seeds of ``args`` over the default group, instead of any there are."""
    if mpu.is_initialized():
        mpu.destroy_model_parallel()
    init(args)


def pack(sequences: list[torch.Tensor]) -> tuple[torch.Tensor, PackedSeqParams]:
    """[1, T] tokens and the packing of whole sequences on one context-parallel rank."""
    lengths = [len(sequence) for sequence in sequences]
    cu = torch.tensor([0, *lengths], device=sequences[0].device).cumsum(0).int()
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths)
    )
    return torch.cat(sequences)[None], params


def packed_logits(model: torch.nn.Module, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits [L, vocab] of each sequence, from one packed forward pass."""
    tokens, params = pack(sequences)
    logits = model(input_ids=tokens, position_ids=None, attention_mask=None, packed_seq_params=params)
    return list(logits[0].split([len(sequence) for sequence in sequences]))


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "model_type": "qwen3",
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 80,
        "vocab_size": 131,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "qwen2": {
        "model_type": "qwen2",
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 72,
        "vocab_size": 131,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "llama": {
        "model_type": "llama",
        "hidden_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "intermediate_size": 56,
        "vocab_size": 131,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "llama-scaled-rope": {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 56,
        "vocab_size": 131,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "max_position_embeddings": 16384,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}


def hide_broken_torchvision() -> None:
    """Tell transformers that there is no torchvision when the installed one does not fit this torch.

    Text models need none, but transformers imports it beside them wherever it finds the package.
    """
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError, OSError):
        import transformers.utils
        import transformers.utils.import_utils

        for module in (transformers.utils, transformers.utils.import_utils):
            module.is_torchvision_available = lambda: False


def write_hf_model(folder: Path, name: str, seed: int = 0, **overrides: Any) -> torch.nn.Module:
    """A random HF model of the family, saved to ``folder``, with weights large enough to show errors."""
    hide_broken_torchvision()
    import transformers

    settings = {**FAMILIES[name], **overrides}
    model_type = settings.pop("model_type")
    config = transformers.AutoConfig.for_model(model_type, **settings, attn_implementation="eager")
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.12)
            if "norm" in parameter_name:
                parameter.add_(1.0)
    model.save_pretrained(folder)
    return model.eval()


def hf_flags(folder: Path) -> list[str]:
    """The model flags that belong to a dense HF checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    rope_theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    flags = [
        *("--hf-checkpoint", str(folder)),
        *("--num-layers", config["num_hidden_layers"], "--hidden-size", config["hidden_size"]),
        *("--ffn-hidden-size", config["intermediate_size"], "--num-attention-heads", heads),
        *("--group-query-attention", "--num-query-groups", config["num_key_value_heads"]),
        *("--kv-channels", config.get("head_dim") or config["hidden_size"] // heads),
        *("--vocab-size", config["vocab_size"], "--make-vocab-size-divisible-by", 8),
        *("--rotary-base", rope_theta, "--norm-epsilon", config["rms_norm_eps"]),
        *("--swiglu", "--use-rotary-position-embeddings", "--disable-bias-linear", "--normalization", "RMSNorm"),
    ]
    if not config["tie_word_embeddings"]:
        flags.append("--untie-embeddings-and-output-weights")
    if config["model_type"] == "qwen2":
        flags.append("--add-qkv-bias")
    if config["model_type"] == "qwen3":
        flags.append("--qk-layernorm")
    if (config.get("rope_parameters") or {}).get("rope_type") == "llama3":
        flags.append("--use-rope-scaling")
    return [str(flag) for flag in flags]
