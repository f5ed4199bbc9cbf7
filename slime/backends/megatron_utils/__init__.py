"""The Megatron trainer.  Importing the package decides how ``megatron.core`` is imported, and imports none of it."""

from slime.backends.megatron_utils import cpu_platform  # noqa: F401
