"""Tests here may import megatron-core first, because the package has already chosen its platform."""

import slime.backends.megatron_utils  # noqa: F401
