"""The flags that rollouts read, as one frozen config.

Plug-ins call ``GenerateState``, ``generate`` and their like with small namespaces of their own, so a flag may be
missing here and nowhere else: ``rollout_config`` is the one function of this package that knows defaults.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field, fields
from typing import Any

DEFAULT_ROLLOUT_TIMEOUT_S = 86400.0
DEFAULT_RETRIES = 60
"""Repetitions of a request that no engine takes, about a second apart."""
BAD_ANSWER_MARGIN_S = 30.0
"""How much longer than the health monitor needs a request waits for its engine to be replaced."""


@dataclass(frozen=True)
class RolloutConfig:
    """Flags of a rollout, named as the attributes of ``args``."""

    # Engines and how they are reached
    hf_checkpoint: str = ""
    sglang_router_ip: str | None = None
    sglang_router_port: int | None = None
    sglang_model_routers: dict[str, tuple[str, int]] | None = None
    sglang_dp_size: int | None = None
    sglang_enable_deterministic_inference: bool = False
    sglang_incremental_streaming_output: bool = False
    router_policy: str | None = None
    router_balance_abs_threshold: int | None = None
    router_balance_rel_threshold: float | None = None
    use_fault_tolerance: bool = False
    engine_start_timeout_s: float = 1800.0
    rollout_health_check_interval: float = 30.0
    rollout_health_check_timeout: float = 30.0
    # Sampling
    rollout_temperature: float = 1.0
    rollout_top_p: float = 1.0
    rollout_top_k: int = -1
    rollout_max_response_len: int | None = None
    rollout_stop: list[str] | None = None
    rollout_stop_token_ids: list[int] | None = None
    rollout_skip_special_tokens: bool = False
    rollout_seed: int = 42
    use_rollout_routing_replay: bool = False
    # Groups
    rollout_batch_size: int = 0
    over_sampling_batch_size: int = 0
    n_samples_per_prompt: int = 1
    num_rollout: int | None = None
    rollout_timeout_s: float = DEFAULT_ROLLOUT_TIMEOUT_S
    partial_rollout: bool = False
    mask_offpolicy_in_partial_rollout: bool = False
    max_staleness: int | None = None
    stale_group_policy: str | None = "regenerate"
    update_weights_interval: int | None = 1
    debug_rollout_only: bool = False
    # Rewards and hooks
    group_rm: bool = False
    reward_key: str | None = None
    eval_reward_key: str | None = None
    custom_generate_function_path: str | None = None
    dynamic_sampling_filter_path: str | None = None
    rollout_sample_hook_path: list[str] | str | None = field(default_factory=list)
    rollout_sample_filter_path: str | None = None
    rollout_all_samples_process_path: str | None = None

    @property
    def router_url(self) -> str:
        """Address of the default router."""
        return f"http://{self.sglang_router_ip}:{self.sglang_router_port}"

    @property
    def fault_detection_s(self) -> float:
        """Seconds within which the health monitor evicts an engine of no use."""
        return self.rollout_health_check_interval + self.rollout_health_check_timeout

    @property
    def request_retries(self) -> int:
        """Repetitions of a request that fails.

        Without ``--use-fault-tolerance`` the run then ends and names the engine.  With it the engine is replaced, and
        the request is repeated until a new one can have started.
        """
        if not self.use_fault_tolerance:
            return DEFAULT_RETRIES
        return DEFAULT_RETRIES + int(self.engine_start_timeout_s + self.fault_detection_s)

    @property
    def bad_answer_patience_s(self) -> float:
        """Seconds during which answers that cannot be used are asked for again: until their engine is evicted."""
        return self.fault_detection_s + BAD_ANSWER_MARGIN_S if self.use_fault_tolerance else 0.0

    def routing_headers(self, session_id: str | None) -> dict[str, str]:
        """Return the headers that keep the requests of a session at one engine."""
        if self.router_policy == "consistent_hashing" and session_id:
            return {"X-SMG-Routing-Key": session_id}
        return {}


_DEFAULTS: tuple[tuple[str, Any], ...] = tuple(vars(RolloutConfig()).items())
assert len(_DEFAULTS) == len(fields(RolloutConfig))


def rollout_config(args: Namespace) -> RolloutConfig:
    """Read the config from ``args``, complete or not."""
    return RolloutConfig(**{name: getattr(args, name, default) for name, default in _DEFAULTS})
