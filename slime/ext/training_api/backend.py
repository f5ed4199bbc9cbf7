"""What the service asks of the machinery behind it: adapters of one base model that are trained and sampled.

Names and meanings of loss inputs, Adam's parameters and sampling parameters are those of the ``tinker`` package.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np


class BackendError(RuntimeError):
    """A request that failed; the service answers its client with the message."""


class RequestRefused(BackendError):
    """A request that cannot be served: the client must change it."""


class BackendDied(BackendError):
    """The trainer or the engines have ended: no further request will be served."""


@dataclass(frozen=True)
class LoraSpec:
    """An adapter as a client asks for it."""

    rank: int
    seed: int | None = None
    """Of A's first numbers; None: the server draws one."""
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = False
    """Not served; the client asks for it by default, and learns by ``weights_info`` that it was not done."""


@dataclass(frozen=True)
class Datum:
    """One sequence."""

    tokens: list[int]
    """What the model reads, length T."""
    inputs: Mapping[str, np.ndarray]
    """What the loss reads, [T] each (``target_tokens`` and what has its shape: [T] or [T, K]): target_tokens int64;
    weights, logprobs, advantages, ... float32."""


@dataclass(frozen=True)
class PassRequest:
    """A pass over data of one model."""

    model_id: str
    data: Sequence[Datum]
    loss: str
    loss_config: Mapping[str, float] = field(default_factory=dict)
    backward: bool = True
    """Add the gradient of the summed loss to the model's."""


@dataclass(frozen=True)
class PassResult:
    """The answer to a pass."""

    outputs: list[dict[str, np.ndarray]]
    """For each datum what the loss gives for its tokens: "logprobs", float32 of the shape of target_tokens."""
    metrics: dict[str, float]
    """``loss:sum`` and what else the loss counts; keys end in the way in which chunks of a batch are joined."""


@dataclass(frozen=True)
class AdamParams:
    """One step of Adam with decoupled weight decay."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Norm of all gradients above which they are scaled down to it; 0: never."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn."""

    max_tokens: int | None = None
    """None: up to the model's context."""
    seed: int | None = None
    stop: Sequence[str] | Sequence[int] | None = None
    """Texts or tokens that end a sequence; None: the end of the model's text; empty: only ``max_tokens``."""
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


StopReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SampledSequence:
    """A sampled sequence."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: StopReason


@dataclass(frozen=True)
class SampleResult:
    """The answer to a sampling request."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    """One a prompt token, None for the first; None where they were not asked for."""
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    """(token, log-prob), the likeliest first, for each prompt token but the first."""


class Backend(ABC):
    """A base model, adapters of it by model id, and engines that serve adapters by name.

    The service calls it from its one event loop; a method returns when the work is done.  Calls may overlap: those of
    one model run in the order in which they were made.  Errors are of :class:`BackendError`, or ValueError and
    SlimeError of the parts below; a request that ends in one has changed nothing.
    """

    @abstractmethod
    async def add_model(self, model_id: str, lora: LoraSpec) -> None:
        """Make an adapter: A drawn from the seed, B zero."""

    @abstractmethod
    async def remove_model(self, model_id: str) -> None:
        """Forget an adapter, its gradients and moments."""

    @abstractmethod
    async def passes(self, requests: Sequence[PassRequest]) -> list[PassResult | Exception]:
        """Run passes of several models; one answer a request.

        Gradients add up in each model until its :meth:`optim_step`.
        """

    @abstractmethod
    async def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        """Take a step with the gradients that have added up, and clear them; return metrics."""

    @abstractmethod
    async def drop_gradients(self, model_id: str) -> None:
        """Clear the gradients that have added up: a pass of the batch failed, so that no step may use the others."""

    @abstractmethod
    async def save_state(self, model_id: str, folder: Path, with_optimizer: bool) -> None:
        """Write an adapter as a PEFT folder, with Adam's moments beside it; it appears whole or not at all."""

    @abstractmethod
    async def load_state(self, model_id: str, folder: Path, with_optimizer: bool) -> None:
        """Give a model what :meth:`save_state` wrote; without the optimizer's state Adam begins again."""

    @abstractmethod
    async def publish_sampler(self, folder_or_model_id: Path | str, name: str) -> None:
        """Have the engines serve the adapter of a folder (Path), or the present one of a model (str), as ``name``."""

    @abstractmethod
    async def drop_sampler(self, name: str) -> None:
        """End what :meth:`publish_sampler` began."""

    @abstractmethod
    async def sample(
        self,
        name: str | None,
        tokens: Sequence[int],
        params: SamplingParams,
        n: int = 1,
        prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> SampleResult:
        """Draw ``n`` continuations of a prompt by a published adapter; by the base model where ``name`` is None."""

    @abstractmethod
    async def check(self) -> None:
        """Tell whether trainer and engines live; the service asks every few seconds.

        Raises:
            BackendDied: one has ended.
        """

    @abstractmethod
    async def close(self) -> None:
        """End trainer and engines."""
