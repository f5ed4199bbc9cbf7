"""MiMo-7B: Qwen2.5's layers with MTP, which transformers does not know; and the same with tied embeddings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.matrix.case import SMALL, FamilyCase
from tests.matrix.flags import model_flags
from tests.matrix.references.mtp import ModelWithMtp, MtpFormat, mtp_extra_loss, mtp_flags, write_with_mtp

MIMO_FORMAT = MtpFormat(
    prefix=lambda index, num_layers: f"model.mtp_layers.{index}.",
    enorm="token_layernorm.weight",
    hnorm="hidden_layernorm.weight",
    eh_proj="input_proj.weight",
    final_norm="final_layernorm.weight",
    hidden_first=True,
    copies=(),
    model_type="qwen2",
)


def write(case: FamilyCase, folder: Path, seed: int) -> None:
    write_with_mtp(case, folder, seed, MIMO_FORMAT)


CASE = FamilyCase(
    name="mimo",
    config={
        **SMALL,
        "model_type": "mimo",
        "num_nextn_predict_layers": 2,
        "head_dim": 8,
        "intermediate_size": 72,
        "rope_theta": 640000.0,
        "rms_norm_eps": 1e-5,
    },
    architecture="MiMoForCausalLM",
    flags=lambda folder: model_flags(folder, *mtp_flags(folder)),
    write=write,
    reference=lambda folder: ModelWithMtp(folder, MIMO_FORMAT),
    extra_loss=mtp_extra_loss,
    about="two MTP layers, trained; their projection takes the halves the other way round",
)
CASES = (
    CASE,
    replace(
        CASE,
        name="mimo-tied",
        config={**CASE.config, "num_nextn_predict_layers": 1, "tie_word_embeddings": True, "vocab_size": 137},
        about="one MTP layer behind a model whose embedding is its vocabulary projection",
    ),
)
