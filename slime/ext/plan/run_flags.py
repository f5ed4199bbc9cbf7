"""What a plan reads of a run's flags, beside the sizes of model, layout and engines."""

from __future__ import annotations

from dataclasses import dataclass

from slime.flags.config import FlagConfig


@dataclass(frozen=True, kw_only=True)
class RunFlags(FlagConfig):
    """Flags of a run, under their names."""

    debug_rollout_only: bool
    debug_train_only: bool
    colocate: bool
    num_gpus_per_node: int
    offload_train: bool
    offload_rollout: bool
    use_critic: bool
    async_save: bool
    keep_old_actor: bool
    frozen_policies: tuple[object, ...]
    state_copy_interval: int | None
    update_weight_buffer_size: int
    update_weight_transport: str | None = None
    """None where no extension pushes over a disk."""
    rollout_batch_size: int | None
    n_samples_per_prompt: int
    global_batch_size: int | None
    use_dynamic_batch_size: bool
    max_tokens_per_gpu: int | None
    micro_batch_size: int
    data_pad_size_multiplier: int
    rollout_max_context_len: int | None
    rollout_max_prompt_len: int | None
    rollout_max_response_len: int | None
    """None where a row of the data holds its response."""
    seq_length: int
    recompute_granularity: str | None
    optimizer_cpu_offload: bool
    optimizer_offload_fraction: float
    lora_rank: int | None = None

    @property
    def num_samples(self) -> int:
        """Of a rollout; 0 where it trains nothing."""
        if self.debug_rollout_only or not self.rollout_batch_size or not self.global_batch_size:
            return 0
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def push_buffer_bytes(self) -> int:
        """Of the bucket that an engine on the same card maps: it stays, asleep and awake."""
        return self.update_weight_buffer_size if self.colocate and not self.debug_train_only else 0
