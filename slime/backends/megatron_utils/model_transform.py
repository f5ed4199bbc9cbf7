"""The interface through which extensions change a model and its optimizer."""

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
    """Changes a model or its optimizer after they are built; ``slime.compose`` chooses the transforms of a run.

    A transform may set these attributes on a parameter:

        served                   function (shard, host_weights) -> tensor that exports and pushes use in place of the
                                 parameter's value
        has_no_data              True: the values are in buffers, and the parameter has no memory
        is_constant_when_frozen  True: while it is frozen, it is pushed only to engines that do not have it yet
    """

    def __init__(self, args: Namespace) -> None:
        self.args = args

    def after_build(self, chunk: torch.nn.Module) -> None:
        """Change a freshly built chunk: not wrapped, randomly initialized."""

    def after_optimizer(self, optimizer: MegatronOptimizer) -> None:
        """Change the optimizer, freshly built over the changed chunks."""

    def arguments(self, batch: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return arguments of the model's forward from a micro-batch's ``multimodal_train_inputs``.

        None if this transform does not read them.
        """
        return None


class AddedParameters(ModelTransform, ABC):
    """A transform that freezes the model and adds parameters.

    Only the added parameters are trained, saved, and kept separately for each policy.
    """

    claim: str
    """What is trained, for messages: "--flag VALUE trains ..."."""

    @abstractmethod
    def owns(self, name: str) -> bool:
        """Return True if ``name`` is an added parameter."""

    @abstractmethod
    def named_parameters(self, chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors of the parameters added to a chunk."""

    @abstractmethod
    def silence(self, copies: Mapping[str, Tensor]) -> None:
        """Change the added parameters in a host copy so that they contribute nothing to the model."""

    # Checkpoints; all of these are collective.

    @abstractmethod
    def load_frozen(self, model: list[torch.nn.Module]) -> None:
        """Load the frozen model."""

    @abstractmethod
    def load_first(self, model: list[torch.nn.Module]) -> bool:
        """In a new run, initialize the added parameters and return True; return False if ``--load`` has them."""

    @abstractmethod
    def state(self, model: Sequence[torch.nn.Module]) -> dict[str, Any]:
        """Return the sharded state of the added parameters."""

    @abstractmethod
    def check_saved(self, saved: Namespace, source: str) -> None:
        """Compare this run's flags with those of the run that saved the parameters.

        Args:
            saved: the arguments in the checkpoint.
            source: the flag and the folder, for messages.

        Raises:
            DataError: under this run's flags the saved values would have another effect on the model.
        """

    @abstractmethod
    def load_state(self, model: Sequence[torch.nn.Module], state: Mapping[str, Tensor]) -> None:
        """Copy the loaded :meth:`state` of a checkpoint into the model."""

    @abstractmethod
    def after_save(self, model: Sequence[torch.nn.Module], rollout_id: int) -> None:
        """Write additional files that accompany a checkpoint."""


def added_parameters(model: Sequence[torch.nn.Module]) -> AddedParameters | None:
    """Return the transform whose parameters are trained; None if the model itself is trained."""
    held = (one for chunk in model for one in transforms_of(chunk) if isinstance(one, AddedParameters))
    return next(held, None)


def transforms_of(chunk: torch.nn.Module) -> Sequence[ModelTransform]:
    """Return the transforms that changed a model chunk, which may be wrapped."""
    transforms: Sequence[ModelTransform] = vars(unwrap_model(chunk)).get("transforms", ())
    return transforms
