"""What an extension may do with the actor's model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace

import torch


class ModelTransform(ABC):
    """A change of the actor's model after it is built; ``slime.compose`` chooses which ones a run has.

    Args:
        args: complete flags.
    """

    def __init__(self, args: Namespace) -> None:
        self.args = args

    @abstractmethod
    def after_build(self, chunk: torch.nn.Module) -> None:
        """Change a chunk, which is bare and has random weights."""
