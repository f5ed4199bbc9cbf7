"""Who holds the GPUs when trainer and engines share them: every change of hands, in one place.

    generate  ->  engines_give()  ->  train (wakes itself, sleeps at its end)  ->  engines_take_weights()  ->  push
              ->  engines_take_cache()  ->  generate

On a CPU machine the same calls are made; no memory moves.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.ray.waiting import wait_for


class GpuHandover:
    """The engines' side of sharing; does nothing unless ``--offload-rollout`` (which ``--colocate`` sets)."""

    def __init__(self, args: Namespace, rollout_manager: Any) -> None:
        self._is_shared = bool(args.offload_rollout) and not args.debug_train_only
        self._manager = rollout_manager
        self._timeout_s = args.weight_update_timeout_s

    def engines_give(self) -> None:
        """The engines release weights, cache and graphs, so that the trainer fits."""
        self._call("offload")

    def engines_take_weights(self) -> None:
        """The engines take room for weights; a push fills it."""
        self._call("onload_weights")

    def engines_take_cache(self) -> None:
        """The engines take room for cache and graphs: they can generate again."""
        self._call("onload_kv")

    def _call(self, method: str) -> None:
        if self._is_shared:
            wait_for(
                getattr(self._manager, method).remote(),
                what=f"the engines' memory ({method})",
                timeout_s=self._timeout_s,
            )
