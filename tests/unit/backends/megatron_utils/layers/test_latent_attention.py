"""Multi-latent attention: rotary embeddings, recompute modes, names on disk, exported weights."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.layers.rotary import LatentRotary
from slime.backends.megatron_utils.megatron_to_hf import hf_form
from slime.backends.megatron_utils.model_provider import get_model_provider
from slime.backends.megatron_utils.update_weight.plain_push import iter_buckets
from slime.backends.megatron_utils.update_weight.transport import SentWeights
from tests.matrix.case import gradients_by_checkpoint_name, load_cases, read_tensors
from tests.matrix.comparisons import gradient_errors
from tests.matrix.parity import GRADIENT_BOUND
from tests.matrix.references.kimi_k2 import KimiK2
from tests.unit.backends.megatron_utils.megatron_case import (
    hide_broken_torchvision,
    packed_logits,
    parse,
    start_single_process,
)

LENGTHS = (7, 1, 19, 2, 11)


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 130, (length,), generator=generator) for length in LENGTHS]


@pytest.fixture(scope="module", params=["deepseek_v3", "moonlight"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """Flags and folder of a tiny checkpoint, with and without a query latent."""
    case = load_cases([request.param])[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    case.write_checkpoint(folder)
    return ["--hf-checkpoint", str(folder), *case.flags(folder)], folder


def build(checkpoint: tuple[list[str], Path], *flags: str) -> tuple[torch.nn.Module, Namespace]:
    args = parse(*checkpoint[0], *flags)
    start_single_process(args)
    model = get_model_provider(args)()
    load_hf_weights(args, [model], checkpoint[1])
    return model, args


# Rotary numbers


YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"mscale": 0.707, "mscale_all_dim": 1.3},
        {"mscale": 0.707, "mscale_all_dim": 0.0},
        {"rope_theta": 50000.0, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
        {"factor": 1.0},
        {"rope_theta": 100.0, "original_max_position_embeddings": 8, "beta_fast": 3.0, "beta_slow": 0.2},
    ],
    ids=["DeepSeek-V3", "two mscales", "no mscale_all_dim", "Kimi-K2", "factor 1", "tiny"],
)
def test_yarn_is_that_of_transformers(change: dict[str, Any]) -> None:
    hide_broken_torchvision()
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    settings = {**YARN, **change}
    config = DeepseekV3Config(
        hidden_size=32,
        num_attention_heads=2,
        q_lora_rank=None,
        rope_parameters=settings,
        max_position_embeddings=163840,
    )
    expected = DeepseekV3RotaryEmbedding(config)
    rotary = LatentRotary(
        width=config.qk_rope_head_dim,
        base=settings["rope_theta"],
        factor=settings["factor"],
        original_length=settings["original_max_position_embeddings"],
        beta_fast=settings["beta_fast"],
        beta_slow=settings["beta_slow"],
        mscale=settings["mscale"],
        mscale_all_dim=settings["mscale_all_dim"],
    )
    torch.testing.assert_close(rotary.frequencies(), expected.inv_freq, rtol=1e-6, atol=0)
    assert rotary.magnitude == pytest.approx(expected.attention_scaling, rel=1e-12)
    scaling = DeepseekV3Attention(config, 0).scaling
    assert rotary.softmax_scale(config.qk_head_dim) == pytest.approx(scaling, rel=1e-12)


# The module


def loss_and_gradients(model: torch.nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    logits = torch.cat(packed_logits(model, sequences()))
    weights = torch.linspace(0.5, 1.5, logits.numel()).view_as(logits)
    loss = (logits.log_softmax(-1) * weights).mean()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_recompute_changes_no_gradient(checkpoint: tuple[list[str], Path]) -> None:
    model, _ = build(checkpoint)
    loss, gradients = loss_and_gradients(model.train())
    global_norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    for flags in (
        ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
        ("--recompute-granularity", "selective"),
        ("--recompute-granularity", "selective", "--recompute-modules", "mla_up_proj"),
        ("--recompute-granularity", "selective", "--recompute-modules", "core_attn", "mla_up_proj", "layernorm"),
        ("--recompute-granularity", "selective", "--recompute-modules", "moe_act", "shared_experts", "mlp"),
    ):
        other, _ = build(checkpoint, *flags)
        other_loss, other_gradients = loss_and_gradients(other.train())
        assert torch.equal(loss, other_loss), flags
        assert gradients.keys() == other_gradients.keys(), flags
        for name, gradient in gradients.items():
            error = (other_gradients[name] - gradient).norm() / max(gradient.norm(), 1e-3 * global_norm)
            assert error <= 1e-5, f"{flags} {name}: {error}"


def test_packed_padded_and_single_sequences_agree(checkpoint: tuple[list[str], Path]) -> None:
    model, _ = build(checkpoint)
    with torch.no_grad():
        packed = packed_logits(model, sequences())
        for sequence, logits in zip(sequences(), packed, strict=True):
            alone = packed_logits(model, [sequence])[0]
            padded = torch.cat([sequence, sequence.new_zeros(3)])[None].expand(2, -1)
            batch = model(input_ids=padded, position_ids=None, attention_mask=None)
            torch.testing.assert_close(logits, alone, atol=1e-5, rtol=0)
            torch.testing.assert_close(logits, batch[1, : len(sequence)], atol=1e-5, rtol=0)


# Weights


def test_what_sglang_fuses_travels_in_one_bucket(checkpoint: tuple[list[str], Path]) -> None:
    model, args = build(checkpoint)
    num_layers = args.num_layers
    for bucket_bytes in (1, 4000, 20_000):
        weights = SentWeights(
            form=hf_form(args, "deepseek_v3"), model=[model], dtype=torch.float32, bucket_bytes=bucket_bytes
        )
        buckets = [[name for name, _ in bucket] for bucket in iter_buckets(weights)]
        together = [
            sum(name.endswith(("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")) for name in bucket)
            for bucket in buckets
        ]
        assert sum(together) == num_layers * (1 if args.q_lora_rank is None else 2)
        if args.q_lora_rank is not None:
            assert all(count % 2 == 0 for count in together)
        assert sorted(name for bucket in buckets for name in bucket) == sorted(read_tensors(checkpoint[1]))


def test_the_plain_reference_of_kimi_k2_is_transformers_deepseek_v3(tmp_path: Path) -> None:
    """transformers lacks Kimi-K2, whose published code is DeepSeek-V3's: both give equal logits and gradients on one
    checkpoint."""
    hide_broken_torchvision()
    import transformers

    case = load_cases(["kimi_k2"])["kimi_k2"]
    case.write_checkpoint(tmp_path)
    ids = torch.randint(0, case.vocab_size, (1, 41), generator=torch.Generator().manual_seed(3))
    model = case.load_reference(tmp_path)
    assert isinstance(model, KimiK2)
    expected = model(ids)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "deepseek_v3"}))
    other = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    actual = other(ids).logits
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)
    for logits in (expected, actual):
        torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
    errors = gradient_errors(gradients_by_checkpoint_name(other), gradients_by_checkpoint_name(model))
    assert max(errors.values()) < GRADIENT_BOUND, max(errors, key=lambda name: errors[name])
