"""Names of slime's loaders inside an engine; an update request gives one as its ``load_format``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.weights.push.engine import EngineProxy

RECEIVER = "slime.ext.fast_push.weight_receiver.receive"
"""``load_format`` of the loader that takes the messages of a two-phase push; see ``--custom-weight-loader``."""
RECEIVER_BEFORE = "slime.backends.sglang_utils.weight_receiver.receive"
"""Older name of the same loader, which external engines may use."""
COMPARE = "slime.ext.fast_push.weight_check.compare_weights"
"""Loader that compares the tensors sent with those the engine holds."""
FILL_WITH_NAN = "slime.ext.fast_push.weight_check.fill_with_nan"
FIND_NAN = "slime.ext.fast_push.weight_check.find_nan"
"""Loader that reports elements not written since :data:`FILL_WITH_NAN`."""
WEIGHT_LOADERS = (COMPARE, FILL_WITH_NAN, FIND_NAN, RECEIVER)
"""Import paths that an update request may name as its ``load_format``, in engines that slime starts."""
OUR_LOADERS = (RECEIVER, RECEIVER_BEFORE)


def loader_of(engine: EngineProxy) -> str | None:
    """Return the name of slime's loader in an engine; None if the engine does not have it."""
    return next((name for name in OUR_LOADERS if name in engine.loaders), None)
