"""megatron-core's own count of a rank's parameters: its model on fake tensors, in a simulated world.

    python -m tests.ext.plan.megatron_counts CASES.json

A separate process, because it pretends to be in worlds of many ranks.  Prints one JSON line per case (flags and
ranks): per rank ``[trained dense, trained expert, frozen, layers from 1]``.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu

from slime.backends.megatron_utils.initialize import initialize_parallel_state
from slime.backends.megatron_utils.model_provider import get_model_provider
from slime.ext.lora.transform import Lora
from tests.unit.backends.megatron_utils.megatron_case import parse


def count_rank(args: Namespace, rank: int) -> list[object]:
    """What ``rank`` of the world of ``args`` holds."""
    dist.init_process_group("fake", store=FakeStore(), world_size=args.world_size, rank=rank)
    try:
        args.enable_gloo_process_groups = False
        initialize_parallel_state(args)
        dense = expert = frozen = 0
        layers: list[int] = []
        virtual = args.virtual_pipeline_model_parallel_size
        for stage in range(virtual or 1):
            vp_stage = stage if virtual else None
            with FakeTensorMode():
                model = get_model_provider(args)(
                    pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                    post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                    vp_stage=vp_stage,
                )
                if args.lora_rank is not None:
                    Lora(args).after_build(model)
            for parameter in model.parameters():
                if not parameter.requires_grad:
                    frozen += parameter.numel()
                elif getattr(parameter, "is_stacked_experts", False):
                    expert += parameter.numel()
                else:
                    dense += parameter.numel()
            layers += [layer.layer_number for layer in model.decoder.layers]
        return [dense, expert, frozen, layers]
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


def main() -> None:
    for case in json.loads(Path(sys.argv[1]).read_text()):
        # Adapters ask how a weight is split, which Megatron records at initialization; experts cannot be initialized
        # here.
        is_drawn = "--lora-rank" in case["flags"] and "--num-experts" not in case["flags"]
        drawn = () if is_drawn else ("--no-initialization",)
        args = parse(*case["flags"], *drawn, "--bf16")
        print(json.dumps([count_rank(args, rank) for rank in case["ranks"]]), flush=True)


if __name__ == "__main__":
    main()
