"""Mistral 3 (Small 3.1, 3.2, Magistral): Mistral in a folder with a vision tower, which only engines load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from slime.backends.megatron_utils.models.family import ModelFamily
from slime.backends.megatron_utils.models.flag_rules import Config, Flag, hf_rope_settings
from slime_plugins.models.shared_flags import NO_BIASES, window_is_idle
from slime_plugins.models.shared_weights import DENSE, TEXT_PART


def mistral3_flags(config: Config) -> Iterator[Flag | str]:
    """Yield tied embeddings, and a message for query scaling, which the small models of 2512 (Ministral 3) have.

    Published folders do not say whether embeddings are tied, and transformers' class for the whole model assumes so.
    """
    tied = bool((config.get("text_config") or {}).get("tie_word_embeddings"))
    yield Flag("untie_embeddings_and_output_weights", not tied, f"tie_word_embeddings of text_config is {tied}")
    yield from window_is_idle(config)
    beta = hf_rope_settings(config).get("llama_4_scaling_beta")
    if beta:
        yield f"llama_4_scaling_beta is {beta}; queries are not scaled by their positions here"


FAMILIES = (
    ModelFamily(
        model_types=("mistral3",),
        weight_map=replace(DENSE, family="Mistral 3 (text)", **TEXT_PART),
        fixed=NO_BIASES,
        flags=mistral3_flags,
    ),
)
