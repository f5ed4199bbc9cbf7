"""Tiny models for the tests of the trainer: flags, HF reference models, one-process parallel state."""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import slime.backends.megatron_utils  # noqa: F401

# isort: split
from megatron.core import mpu
from megatron.core.packed_seq_params import PackedSeqParams

from slime.backends.megatron_utils.arguments import add_megatron_arguments, validate_megatron_arguments
from slime.backends.megatron_utils.initialize import init
from slime.compose import flag_groups
from slime.flags.cluster import derive_for_extensions
from slime.flags.group import complete_all
from slime.flags.parse import get_slime_extra_args_provider
from tests.matrix.case import hide_broken_torchvision, load_cases, read_config

__all__ = ["CASES", "FAMILIES", "hf_flags", "hide_broken_torchvision", "packed_logits", "parse", "write_hf_model"]


def build_parser() -> argparse.ArgumentParser:
    """Return a parser of the trainer's and slime's flags, for a trainer of one process that pushes nothing."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    get_slime_extra_args_provider(groups=flag_groups())(parser)
    add_megatron_arguments(parser)
    parser.set_defaults(debug_train_only=True, actor_num_gpus_per_node=1, distributed_timeout_minutes=2)
    return parser


def parse(*flags: str) -> argparse.Namespace:
    """Complete args from flags, which may include numbers."""
    args = build_parser().parse_args([str(flag) for flag in flags])
    derive_for_extensions(args)
    validate_megatron_arguments(args)
    complete_all(args, flag_groups())
    return args


def start_single_process(args: argparse.Namespace) -> None:
    """Create, once per test process, a world of one rank with parallel groups of size one."""
    if not dist.is_initialized():
        store = Path(tempfile.mkdtemp()) / f"store-{os.getpid()}"
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=f"file://{store}", world_size=1, rank=0)
    start_parallel(args)


def start_parallel(args: argparse.Namespace) -> None:
    """The parallel groups and seeds of ``args`` over the default group, replacing existing ones.

    A single rank keeps its groups, which have size one whatever the flags are, because ending them takes 0.1 s.
    """
    if mpu.is_initialized() and dist.get_world_size() > 1:
        mpu.destroy_model_parallel()
        # Megatron-core only forgets its groups; each keeps three threads that wake up a hundred times per second.
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
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


CASES = load_cases(["qwen2", "qwen3", "llama", "qwen3_moe"])
FAMILIES: dict[str, dict[str, Any]] = {name: dict(case.config) for name, case in CASES.items() if not case.has_experts}
"""Configs of the matrix's dense families: small, with awkward sizes."""


def write_hf_model(folder: Path, name: str, seed: int = 0, **overrides: Any) -> torch.nn.Module:
    """Save a random HF model of the family to ``folder``, with weights large enough to reveal errors."""
    case = dataclasses.replace(CASES[name], config={**CASES[name].config, **overrides})
    folder.mkdir(parents=True, exist_ok=True)
    case.write_checkpoint(folder, seed)
    return case.load_reference(folder)


def hf_flags(folder: Path) -> list[str]:
    """The model flags for a HF checkpoint of one of :data:`CASES`."""
    model_type = read_config(folder)["model_type"]
    case = next(case for case in CASES.values() if case.config["model_type"] == model_type)
    return ["--hf-checkpoint", str(folder), *case.flags(folder)]
