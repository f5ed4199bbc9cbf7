"""The Megatron model gives what transformers gives: log-probs and the gradient of every parameter, in fp32."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf
from slime.backends.megatron_utils.model_provider import get_model_provider
from slime.backends.megatron_utils.parameters import iter_global_parameters
from tests.unit.backends.megatron_utils.megatron_case import (
    FAMILIES,
    hf_flags,
    packed_logits,
    parse,
    start_single_process,
    write_hf_model,
)

LENGTHS = (7, 1, 19, 2, 11)


def random_sequences(vocab_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in LENGTHS]


def next_token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-prob of each token but the first."""
    return logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def weighted_loss(log_probs: list[Tensor]) -> Tensor:
    """A loss whose weights differ from token to token."""
    flat = torch.cat(log_probs)
    return -(flat * torch.linspace(0.5, 1.5, flat.numel())).mean()


@pytest.fixture(params=sorted(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[torch.nn.Module, torch.nn.Module, Namespace]:
    hf_model = write_hf_model(tmp_path, request.param)
    args = parse(*hf_flags(tmp_path))
    start_single_process(args)
    model = get_model_provider(args)()
    load_hf_weights(args, [model], tmp_path)
    return hf_model, model, args


def hf_log_probs(model: torch.nn.Module, sequences: list[Tensor]) -> list[Tensor]:
    return [next_token_log_probs(model(s[None]).logits[0], s) for s in sequences]


def megatron_log_probs(model: torch.nn.Module, sequences: list[Tensor], vocab_size: int) -> list[Tensor]:
    logits = packed_logits(model, sequences)
    return [next_token_log_probs(x[:, :vocab_size], s) for x, s in zip(logits, sequences)]


def test_log_probs_equal_those_of_transformers(case: tuple[torch.nn.Module, torch.nn.Module, Namespace]) -> None:
    hf_model, model, args = case
    sequences = random_sequences(args.vocab_size)
    with torch.no_grad():
        expected = torch.cat(hf_log_probs(hf_model, sequences))
        actual = torch.cat(megatron_log_probs(model, sequences, args.vocab_size))
    assert expected.std() > 0.5  # weights that tell errors apart
    assert (actual - expected).abs().max() <= 2e-5


def test_the_gradient_of_every_parameter_equals_that_of_transformers(
    case: tuple[torch.nn.Module, torch.nn.Module, Namespace],
) -> None:
    hf_model, model, args = case
    sequences = random_sequences(args.vocab_size)
    weighted_loss(hf_log_probs(hf_model, sequences)).backward()
    weighted_loss(megatron_log_probs(model, sequences, args.vocab_size)).backward()
    expected = {name: parameter.grad for name, parameter in hf_model.named_parameters()}
    # A gradient is laid out as its parameter is, so the exporter brings it to the HF layout.
    actual = {}
    for name, shard in iter_global_parameters([model]):
        assert shard.parameter.grad is not None, name
        actual.update(convert_to_hf(args, args_model_name(args), name, shard.part_of(shard.parameter.grad)))
    assert actual.keys() == expected.keys()
    global_norm = torch.cat([grad.flatten() for grad in expected.values()]).norm()
    for name, grad in expected.items():
        error = (actual[name] - grad).norm() / max(grad.norm(), 1e-3 * global_norm)
        assert error <= 1e-4, f"{name}: {error}"


def args_model_name(args: Namespace) -> str:
    if args.qk_layernorm:
        return "Qwen3Config"
    return "Qwen2Config" if args.add_qkv_bias else "LlamaConfig"


def test_packed_sequences_give_the_same_logits_as_single_ones(
    case: tuple[torch.nn.Module, torch.nn.Module, Namespace],
) -> None:
    _, model, args = case
    sequences = random_sequences(args.vocab_size)
    with torch.no_grad():
        together = packed_logits(model, sequences)
        alone = [packed_logits(model, [sequence])[0] for sequence in sequences]
    for packed, single in zip(together, alone):
        torch.testing.assert_close(packed, single, atol=1e-5, rtol=0)
