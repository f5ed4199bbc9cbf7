"""Several sets of weights for one model: the actor, and frozen policies beside it, parked on the host.

Only one set is in the model at a time; ``switch_to`` copies another in place, so that buffers, optimizer shards and
the schedules' references stay what they are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.utils import unwrap_model

from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)


class ModelSwitch:
    """Host copies of a model's parameters and persistent buffers, by tag.

    Invariant: ``active`` names the set that is in the model; the host copy under that tag may be older, until
    ``backup`` is called.

    Args:
        model: this rank's chunks.
        active: the tag of what is in the model now.
    """

    def __init__(self, model: Sequence[torch.nn.Module], active: str = "actor") -> None:
        self._model = model
        self._host: dict[str, dict[str, Tensor]] = {}
        self.active = active

    def _live(self) -> Iterator[tuple[str, Tensor]]:
        for index, chunk in enumerate(self._model):
            inner = unwrap_model(chunk)
            yield from ((f"{index}.{name}", tensor) for name, tensor in inner.named_parameters())
            yield from ((f"{index}.{name}", tensor) for name, tensor in inner.named_buffers())

    @property
    def tags(self) -> list[str]:
        """The sets that have a host copy."""
        return list(self._host)

    def get(self, tag: str) -> Mapping[str, Tensor]:
        """The host copy of ``tag`` by ``{chunk}.{parameter name}``.

        Raises:
            ConfigError: there is none.
        """
        if tag not in self._host:
            raise ConfigError(f"no weights are kept under {tag!r}; kept are {self.tags}")
        return self._host[tag]

    @torch.no_grad()
    def backup(self, tag: str) -> None:
        """Copy what is in the model to the host, under ``tag``."""
        copies = self._host.setdefault(tag, {})
        for name, tensor in self._live():
            if name not in copies:
                copies[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            copies[name].copy_(tensor.detach(), non_blocking=True)
        _finish_copies()

    @torch.no_grad()
    def switch_to(self, tag: str) -> None:
        """Put ``tag`` into the model; does nothing when it is there already."""
        if tag == self.active:
            return
        copies = self.get(tag)
        for name, tensor in self._live():
            tensor.detach().copy_(copies[name], non_blocking=True)
        _finish_copies()
        self.active = tag

    def rename(self, tag: str) -> None:
        """Say that what is in the model now is ``tag``: after a checkpoint was loaded into it."""
        self.active = tag

    def copy(self, source: str, target: str) -> None:
        """Make ``target`` equal ``source``, both on the host."""
        copies = self._host.setdefault(target, {})
        for name, tensor in self.get(source).items():
            if name not in copies:
                copies[name] = torch.empty_like(tensor, pin_memory=tensor.is_pinned())
            copies[name].copy_(tensor)


def _finish_copies() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
