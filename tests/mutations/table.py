"""All mutations."""

from __future__ import annotations

from tests.mutations.advantages import ADVANTAGES
from tests.mutations.data import DATA
from tests.mutations.losses import LOSSES
from tests.mutations.mutation import Mutation
from tests.mutations.trainer import TRAINER_BUGS

MUTATIONS: tuple[Mutation, ...] = (*LOSSES, *ADVANTAGES, *DATA, *TRAINER_BUGS)
