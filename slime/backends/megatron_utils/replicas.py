"""Checks of each step: ranks that must hold the same weights do, and every rank's loss is finite.

megatron-core's sharded optimizer gives every rank of a data-parallel group the same norm of the gradient, whatever a
rank computed; what a rank that went its own way cannot hide is its copy of the weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import mpu
from torch import Tensor

from slime.utils.errors import StepError


@dataclass(frozen=True, slots=True)
class Marks:
    """Checksums and losses of the ranks of one group in a step, on the device; reading them waits for the device."""

    ranks: list[int]
    table: Tensor
    """A row for each rank: the checksum of its weights, the micro-batches whose loss is not finite."""

    @classmethod
    def gather(cls, model: Sequence[torch.nn.Module], losses: Sequence[Tensor]) -> list[Marks]:
        """Exchange the marks of the ranks that hold the same dense weights, and the same experts.

        Nothing waits for the device: read them after something that does anyway.

        Args:
            losses: of this rank's micro-batches; none except on the last pipeline stage.
        """
        weights = [weight for chunk in model for weight in chunk.parameters() if weight.requires_grad]
        experts = [weight for weight in weights if not getattr(weight, "allreduce", True)]
        dense = [weight for weight in weights if getattr(weight, "allreduce", True)]
        gathered = []
        for replicated, group in (
            (dense, mpu.get_data_parallel_group(with_context_parallel=True)),
            (experts, mpu.get_expert_data_parallel_group()),
        ):
            if replicated:
                num_ranks = dist.get_world_size(group)
                not_finite = _num_not_finite(losses, replicated[0].device)
                # A rank alone has nothing to compare, and need not read all its weights again in each step.
                checksum = _checksum(replicated) if num_ranks > 1 else torch.zeros_like(not_finite)
                mine = torch.stack([checksum, not_finite])
                table = mine.new_empty(num_ranks * 2)
                dist.all_gather_into_tensor(table, mine, group=group)
                gathered.append(cls(dist.get_process_group_ranks(group), table))
        return gathered

    def check(self, moment: str) -> None:
        """Compare the copies of the weights.

        Raises:
            StepError: they differ; names the ranks that hold others than most do.
        """
        sums = self.table.tolist()[::2]
        counts = Counter(sums).most_common()
        if len(counts) == 1:
            return
        is_tie = counts[0][1] == counts[1][1]
        others = [rank for rank, value in zip(self.ranks, sums, strict=True) if is_tie or value != counts[0][0]]
        who = f"ranks {others} hold weights that differ" if is_tie else f"ranks {others} hold other weights than most"
        raise StepError(
            f"{moment}: {who}, of ranks {self.ranks}, which must hold the same. Look at the GPU and memory of their "
            "nodes; --on-nan rollback goes back to a checkpoint instead of ending the run"
        )

    def not_finite(self) -> list[int]:
        """Return the ranks with a loss that is not finite."""
        return [rank for rank, count in zip(self.ranks, self.table.tolist()[1::2], strict=True) if count]


@torch.no_grad()
def _checksum(weights: Sequence[Tensor]) -> Tensor:
    """Sum of the bits of every weight's norm: equal for equal weights, and changed by any rank's own update."""
    norms = torch.stack(torch._foreach_norm(list(weights), 2, dtype=torch.float32))
    return norms.view(torch.int32).sum(dtype=torch.int64)


def _num_not_finite(losses: Sequence[Tensor], device: torch.device) -> Tensor:
    if not losses:
        return torch.zeros((), dtype=torch.int64, device=device)
    return (~torch.stack([loss.detach() for loss in losses]).isfinite()).sum()
