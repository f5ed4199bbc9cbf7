"""GLM-4V: the positions of a request's ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def positions_of_ids(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return the positions of a request's token ids, none of which is padding.

    SGLang 0.5.15 masks them by re-tokenizing their text.  If that gives another number of tokens, which can happen for
    a sampled response, the request fails.
    """
    return original(*args, **{**options, "attention_mask": None})


HOOKS = (
    ("sglang.srt.layers.rotary_embedding.MRotaryEmbedding.get_rope_index_glm4v", positions_of_ids, "around"),
)  # fmt: skip
