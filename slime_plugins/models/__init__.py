"""Models that the trainer loads by path (--spec), not by import."""

import slime.backends.megatron_utils  # noqa: F401  # before any model imports megatron.core
