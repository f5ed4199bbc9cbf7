"""The weight push of a plan: how many bytes go which way."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from slime.planning.engines import EngineGpus
from slime.planning.from_flags.engines import quantized_bytes
from slime.planning.parallel import ParallelSizes
from slime.planning.parameters import model_size
from slime.planning.plan import EngineGroupPlan
from slime.planning.traffic import PushTraffic, push_traffic
from slime.train_data.model_dims import ModelDims


def plan_push(
    args: Namespace, shape: ModelDims, sizes: ParallelSizes, groups: list[EngineGroupPlan],
    places: list[EngineGpus], hf_config: Mapping[str, Any],
) -> PushTraffic | None:  # fmt: skip
    """Traffic of a full push; None when nothing is pushed.  Embedding and head stay in two bytes an element."""
    if not groups or args.debug_rollout_only:
        return None
    vocab = (1 if shape.has_tied_embeddings else 2) * shape.vocab_rows * shape.hidden_size
    matrices = model_size(shape) - vocab
    model_bytes = int(matrices * quantized_bytes(hf_config) + 2 * vocab)
    way = "disk" if args.update_weight_transport == "disk" else "colocated" if args.colocate else "distributed"
    return push_traffic(
        model_bytes,
        num_engines=len(places),
        trainer_ranks=sizes.world,
        pipeline=sizes.pipeline,
        bucket_bytes=args.update_weight_buffer_size,
        way=way,
    )
