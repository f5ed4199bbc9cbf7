"""What an extension may do with a model and its optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model
from torch import Tensor


class ModelTransform:
    """A change of a model or its optimizer after they are built; ``slime.compose`` chooses which ones a run has.

    A transform may set attributes of a parameter:

        served                   function (shard, host_weights) -> tensor: what exports and pushes take in place of
                                 its numbers
        has_no_data              True: the numbers are in buffers, and the parameter has no memory
        is_constant_when_frozen  True: while it is frozen, engines that have it get it no more
    """

    def __init__(self, args: Namespace) -> None:
        self.args = args

    def after_build(self, chunk: torch.nn.Module) -> None:
        """Change a chunk, which is bare and has random weights."""

    def after_optimizer(self, optimizer: MegatronOptimizer) -> None:
        """Change the optimizer, which was just built over the changed chunks."""

    def arguments(self, batch: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what the model's forward takes of the ``multimodal_train_inputs`` of a micro-batch; None: nothing."""
        return None


class AddedParameters(ModelTransform, ABC):
    """A transform that freezes the model and adds parameters, which alone are trained, saved and kept by policy."""

    claim: str
    """What trains, for messages: "--flag VALUE trains ..."."""

    @abstractmethod
    def owns(self, name: str) -> bool:
        """Return True for the name of a parameter that was added."""

    @abstractmethod
    def named_parameters(self, chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters that were added to a chunk."""

    @abstractmethod
    def silence(self, copies: Mapping[str, Tensor]) -> None:
        """Let the parameters of a host copy add nothing to the model."""

    # Checkpoints; all of these are collective.

    @abstractmethod
    def load_frozen(self, model: list[torch.nn.Module]) -> None:
        """Load the model under the parameters."""

    @abstractmethod
    def load_first(self, model: list[torch.nn.Module]) -> bool:
        """Fill the parameters of a run that begins and return True; return False when ``--load`` has them."""

    @abstractmethod
    def state(self, model: Sequence[torch.nn.Module]) -> dict[str, Any]:
        """Return the sharded state of the parameters."""

    @abstractmethod
    def check_saved(self, saved: Namespace, source: str) -> None:
        """Compare this run's flags with those of the run that saved the parameters.

        Args:
            saved: the arguments in the checkpoint.
            source: the flag and the folder, for messages.

        Raises:
            DataError: the same numbers would add something else to the model.
        """

    @abstractmethod
    def load_state(self, model: Sequence[torch.nn.Module], state: Mapping[str, Tensor]) -> None:
        """Copy what a checkpoint has for :meth:`state` into the model."""

    @abstractmethod
    def after_save(self, model: Sequence[torch.nn.Module], rollout_id: int) -> None:
        """Write what belongs beside a checkpoint."""


def added_parameters(model: Sequence[torch.nn.Module]) -> AddedParameters | None:
    """Return the transform whose parameters are trained; None when the model itself is."""
    held = (one for chunk in model for one in transforms_of(chunk) if isinstance(one, AddedParameters))
    return next(held, None)


def transforms_of(chunk: torch.nn.Module) -> Sequence[ModelTransform]:
    """Return the transforms that changed a chunk of the model, which may be wrapped."""
    transforms: Sequence[ModelTransform] = vars(unwrap_model(chunk)).get("transforms", ())
    return transforms
