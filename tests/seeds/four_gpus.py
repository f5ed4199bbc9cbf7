"""Recipes of the documents in layouts that need four GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.seeds.recipes import (
    FILTER,
    FLASH,
    GLM4,
    GLM45,
    GLM52,
    ONE_BY_ONE,
    R1,
    TRAINED_MTP,
    Job,
    Seed,
)

FOUR_RANKS = "--actor-num-gpus-per-node 4 --rollout-num-gpus 4"
ENGINE_OF_FOUR = f"{FOUR_RANKS} --rollout-num-gpus-per-engine 4 --sglang-dp-size 4 --sglang-ep-size 4"


WIDE_EXPERTS = {"moe_intermediate_size": 512}
"""FP8 has blocks of 128, and the engine splits shared experts in four.  FP8 alone moves transformers' log-probs of
these models by .18 (GLM-4.5) and .19 (DeepSeek-R1)."""


def on_four(seed: Seed, flags: str, *jobs: Job, sizes: Mapping[str, Any] | None = None) -> Seed:
    """Return the seed with other jobs, each on four GPUs, and other sizes of its model."""
    form = replace(
        seed.gpu,
        sizes={**seed.gpu.sizes, **(sizes or {})},
        flags=f"{seed.gpu.flags} {flags}",
        jobs=tuple(replace(job, num_gpus=4) for job in jobs),
    )
    return replace(seed, cpu=None, gpu=form)


GLM4_FOUR = on_four(
    GLM4,
    f"""--over-sampling-batch-size 24 --dynamic-sampling-filter-path {FILTER} --partial-rollout
    --buffer-filter-path slime.rollout.data_source.pop_first --actor-num-gpus-per-node 2 --rollout-num-gpus 2""",
    Job(
        "TP2 SP; an engine of TP2 on two others",
        "--tensor-model-parallel-size 2 --context-parallel-size 1 --rollout-num-gpus-per-engine 2",
        shows=("eval", "filter", "partial"),
        bound=0.1,  # answers finished with newer weights
    ),
    Job(
        "CP2; two engines on two others",
        f"{ONE_BY_ONE} --context-parallel-size 2 --rollout-num-gpus-per-engine 1",
        shows=("eval", "filter", "partial"),
        goes_on=True,
        bound=0.1,
    ),
)

GLM45_FOUR = on_four(
    GLM45,
    ENGINE_OF_FOUR,
    Job(
        "TP2 PP2 EP2 SP, Adam on the host, MTP trained; an FP8 engine of DP attention 4, EP4",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2",
        shows=("eval", "filter", "mtp"),
        bound=0.3,
    ),
    Job(
        "PP2 CP2 EP2, MTP trained; the same engine",
        """--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --context-parallel-size 2
        --expert-model-parallel-size 2""",
        shows=("eval", "filter", "mtp"),
        goes_on=True,
        bound=0.3,
    ),
    sizes=WIDE_EXPERTS,
)

R1_FOUR = on_four(
    R1,
    ENGINE_OF_FOUR,
    Job(
        "PP2 (3 and 1 layers) CP2 EP2, Adam on the host; an FP8 engine of DP attention 4, EP4",
        """--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1 --context-parallel-size 2
        --expert-model-parallel-size 2""",
        shows=("eval", "filter"),
        bound=0.2,
    ),
    Job(
        "TP2 EP4 SP; the same engine",
        """--pipeline-model-parallel-size 1 --decoder-last-pipeline-num-layers none --tensor-model-parallel-size 2
        --expert-model-parallel-size 4""",
        shows=("eval", "filter"),
        goes_on=True,
        bound=0.2,
    ),
    sizes=WIDE_EXPERTS,
)

FLASH_FOUR = on_four(
    FLASH,
    f"{FOUR_RANKS} --rollout-num-gpus-per-engine 4 --sglang-dp-size 4 {TRAINED_MTP}",
    Job(
        "TP4 EP4 SP, Adam on the host, MTP trained; an engine of DP attention 4, EAGLE 2/1/3",
        "--tensor-model-parallel-size 4 --expert-model-parallel-size 4",
        shows=("eval", "drafts", "mtp"),
        bound=0.05,
    ),
    Job(
        "EP4, MTP trained; the same engine",
        "--tensor-model-parallel-size 1 --expert-model-parallel-size 4",
        shows=("eval", "drafts", "mtp"),
        goes_on=True,
        bound=0.05,
    ),
)

GLM52_FOUR = on_four(
    GLM52,
    """--actor-num-gpus-per-node 4 --sglang-config {base}/wide_engines.yaml --rollout-num-gpus-per-engine 2
    --sglang-dp-size 2 --sglang-ep-size 2 --expert-model-parallel-size 2""",
    Job(
        "PP2 (2 and 2 layers), allgather CP2, EP2, Adam on the host; FP8 prefill and decode on two GPUs each, "
        "DP attention 2, EP2, FlashMLA, EAGLE 4/1/5",
        """--pipeline-model-parallel-size 2 --context-parallel-size 2 --decoder-first-pipeline-num-layers 2
        --decoder-last-pipeline-num-layers 2""",
        shows=("eval", "drafts"),
        bound=0.2,
    ),
)

ON_FOUR_GPUS = {
    **{"glm4-9b-four": GLM4_FOUR, "glm-4.5-four": GLM45_FOUR, "deepseek-r1-four": R1_FOUR},
    **{"glm-4.7-flash-four": FLASH_FOUR, "glm-5.2-four": GLM52_FOUR},
}
