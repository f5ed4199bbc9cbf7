"""Tests here may import megatron-core first: the package has decided how by then."""

import slime.backends.megatron_utils  # noqa: F401
