"""The engines' part of a plan: where they live, what rules they break, what a GPU of each group holds."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from slime.backends.sglang_utils.sglang_config import SGLangConfig, resolve_sglang_config
from slime.planning import rules
from slime.planning.engines import EngineGpus, EngineShape, engine_memory, engine_places
from slime.planning.from_flags.trainer import trainer_bytes_beside_engine
from slime.planning.gpus import plan_gpus
from slime.planning.parallel import ParallelSizes
from slime.planning.plan import EngineGroupPlan, PlanOptions
from slime.train_data.model_dims import ModelDims
from slime.utils.errors import SlimeError


def plan_engines(
    args: Namespace, shape: ModelDims, sizes: ParallelSizes, hf_config: Mapping[str, Any], options: PlanOptions,
    problems: list[str],
) -> tuple[list[EngineGpus], list[EngineGroupPlan]]:  # fmt: skip
    """Every engine's place, and each group of like engines that serve; none for external engines.

    What the groups break is appended to ``problems``.
    """
    if args.debug_train_only or args.rollout_external or not args.rollout_num_gpus:
        return [], []
    try:
        config: SGLangConfig = resolve_sglang_config(args)
    except SlimeError as error:
        problems.append(str(error))
        return [], []
    trainer_gpus = 0 if args.debug_rollout_only else sizes.world
    groups = [
        (model.name, group.worker_type, group.num_gpus, group.num_gpus_per_engine)
        for model in config.models
        for group in model.server_groups
    ]
    places = engine_places(
        groups,
        rollout_offset=plan_gpus(args).rollout_offset,
        gpus_per_node=args.num_gpus_per_node,
        trainer_gpus=trainer_gpus,
    )
    problems += rules.placement_problems(places, args.num_gpus_per_node)
    flags = {name.removeprefix("sglang_"): value for name, value in vars(args).items() if name.startswith("sglang_")}
    weight_bytes = quantized_bytes(hf_config)
    plans = []
    for model in config.models:
        for group in model.server_groups:
            if group.worker_type in ("placeholder", "encoder"):
                continue
            engine = EngineShape.from_flags(
                flags, group.overrides, num_gpus=group.num_gpus_per_engine, weight_bytes=weight_bytes,
                mtp_layers=max(shape.num_mtp_layers, 1),
            )  # fmt: skip
            where = f"Engines {group.worker_type!r} of model {model.name!r}"
            merged = {**flags, **group.overrides, "disaggregation": group.worker_type}
            found = list(rules.engine_problems(shape, engine, merged, options.environment, where))
            problems += found
            other = trainer_bytes_beside_engine(args, sizes)
            memory = engine_memory(shape, engine, card_bytes=options.card.memory, other_bytes=other)
            plans.append(
                EngineGroupPlan(
                    model.name, group.worker_type, group.num_gpus // group.num_gpus_per_engine,
                    group.num_gpus_per_engine, max(1, group.num_gpus_per_engine // args.num_gpus_per_node), engine,
                    memory,
                )
            )  # fmt: skip
    return places, plans


def quantized_bytes(hf_config: Mapping[str, Any]) -> float:
    """Bytes of an element of a layer's matrix as the engines store it."""
    quantization = hf_config.get("quantization_config") or {}
    method = str(quantization.get("quant_method", ""))
    if method == "fp8":
        rows, columns = quantization.get("weight_block_size") or (1, 128)
        return 1 + 4 / (rows * columns)
    if method in ("compressed-tensors", "awq", "gptq"):
        return 0.5 + 2 / 32
    return 2.0
