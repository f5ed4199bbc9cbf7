"""The generate function for conversations about images.

    --custom-generate-function-path examples.geo3k_vlm_multi_turn.rollout.generate
    --custom-config-path examples/geo3k_vlm_multi_turn/geo3k_vlm_multi_turn_config.yaml

Settings: ``max_turns``, and ``rollout_interaction_env_path``, a module with ``build_env(sample, args)``.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from typing import Any

from slime.rollout.multi_turn import converse
from slime.utils.types import Sample

MAX_TURNS = 3
ENVIRONMENT = "examples.geo3k_vlm_multi_turn.env_geo3k"


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """``--custom-generate-function-path``: alternate turns of the policy and the environment."""
    module = importlib.import_module(getattr(args, "rollout_interaction_env_path", None) or ENVIRONMENT)
    environment = module.build_env(sample=sample, args=args)
    environment.reset()

    async def observe(turn: str) -> list[dict[str, Any]] | None:
        observation, is_done, _ = environment.step(turn)
        return None if is_done else [environment.format_observation(observation)]

    try:
        return await converse(
            args, sample, sampling_params, observe, max_turns=int(getattr(args, "max_turns", None) or MAX_TURNS)
        )
    finally:
        environment.close()
