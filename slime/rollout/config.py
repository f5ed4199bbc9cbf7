"""The flags that rollouts read, as one frozen config.

Plug-ins call ``GenerateState``, ``generate`` and similar functions with partial namespaces; missing flags take their
defaults.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.flags.algorithm import add_algorithm_arguments
from slime.flags.cluster import add_cluster_arguments
from slime.flags.config import FlagConfig
from slime.flags.debug import add_debug_arguments
from slime.flags.fault_tolerance import add_fault_tolerance_arguments
from slime.flags.reward import add_reward_arguments
from slime.flags.rollout import add_rollout_arguments
from slime.flags.weight_sync import add_weight_sync_arguments
from slime.utils.net import http_url

DEFAULT_RETRIES = 60
"""Retries of a request that no engine accepts, about one second apart."""
KEEP_SESSIONS = ("consistent_hashing", "manual")
"""Router policies that read the routing key, so that all requests of a session reach one worker."""
BAD_ANSWER_MARGIN_S = 30.0
"""Seconds a request waits for a replacement engine after the health monitor has evicted its own."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(
    FlagConfig,
    flags=(
        add_rollout_arguments,
        add_reward_arguments,
        add_cluster_arguments,
        add_fault_tolerance_arguments,
        add_weight_sync_arguments,
        add_algorithm_arguments,
        add_debug_arguments,
    ),
):
    """Rollout flags, under their ``args`` attribute names."""

    # Engines and routing.  Defaults for flags of SGLang and its router are set here.
    hf_checkpoint: str = ""
    sglang_router_ip: str | None = None
    sglang_router_port: int | None = None
    sglang_model_routers: dict[str, tuple[str, int]] | None = None
    sglang_dp_size: int | None = None
    sglang_enable_deterministic_inference: bool = False
    sglang_incremental_streaming_output: bool = False
    router_policy: str | None = None
    use_fault_tolerance: bool
    engine_start_timeout_s: float
    rollout_health_check_interval: float
    rollout_health_check_timeout: float
    # Sampling
    rollout_temperature: float
    rollout_top_p: float
    rollout_top_k: int
    rollout_max_response_len: int | None
    rollout_stop: list[str] | None
    rollout_stop_token_ids: list[int] | None
    rollout_skip_special_tokens: bool
    rollout_seed: int
    use_rollout_routing_replay: bool
    # Groups
    rollout_batch_size: int
    over_sampling_batch_size: int
    n_samples_per_prompt: int = 1
    num_rollout: int | None
    rollout_timeout_s: float
    partial_rollout: bool
    mask_offpolicy_in_partial_rollout: bool
    max_staleness: int | None
    stale_group_policy: str
    update_weights_interval: int
    debug_rollout_only: bool
    # Rewards and hooks
    group_rm: bool
    reward_key: str | None
    eval_reward_key: str | None
    custom_generate_function_path: str | None = None
    dynamic_sampling_filter_path: str | None = None
    rollout_sample_filter_path: str | None = None
    rollout_all_samples_process_path: str | None = None

    @property
    def router_url(self) -> str:
        """Address of the default router."""
        return http_url(self.sglang_router_ip, self.sglang_router_port)

    @property
    def fault_detection_s(self) -> float:
        """Seconds within which the health monitor evicts an unusable engine."""
        return self.rollout_health_check_interval + self.rollout_health_check_timeout

    @property
    def request_retries(self) -> int:
        """Retries of a failing request.

        Without ``--use-fault-tolerance`` the run then ends with an error that names the engine.  With it, the request
        is retried long enough for a replacement engine to start.
        """
        if not self.use_fault_tolerance:
            return DEFAULT_RETRIES
        return DEFAULT_RETRIES + int(self.engine_start_timeout_s + self.fault_detection_s)

    @property
    def bad_answer_patience_s(self) -> float:
        """Seconds during which requests with unusable answers are retried, so that their engine can be evicted."""
        return self.fault_detection_s + BAD_ANSWER_MARGIN_S if self.use_fault_tolerance else 0.0

    def routing_headers(self, session_id: str | None) -> dict[str, str]:
        """Return the headers that pin the requests of a session to one engine."""
        if self.router_policy in KEEP_SESSIONS and session_id:
            return {"X-SMG-Routing-Key": session_id}
        return {}
