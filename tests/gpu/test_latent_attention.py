"""Multi-latent attention on CUDA: log-probs and gradients against transformers, in fp32 and in bf16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf
from slime.backends.megatron_utils.model_provider import get_model_provider
from slime.backends.megatron_utils.parameters import iter_global_parameters
from tests.matrix.case import FamilyCase, load_cases
from tests.unit.backends.megatron_utils.megatron_case import packed_logits, parse, start_single_process

pytestmark = [pytest.mark.gpu(1), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (7, 1, 190, 2, 61)


def dense_case(**changes: int | None) -> FamilyCase:
    """The matrix's DeepSeek-V3 without experts (bf16 would change their choice), in widths that flash kernels
    support."""
    case = load_cases(["deepseek_v3"])["deepseek_v3"]
    widths = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 32, "num_hidden_layers": 3}
    config = {**case.config, **widths, "first_k_dense_replace": 3, **changes}
    return FamilyCase(name="dense", config=config, flags=case.flags)


@pytest.mark.parametrize("query_rank", [28, None])
@pytest.mark.parametrize("precision", ["--fp32", "--bf16"])
def test_log_probs_and_gradients_equal_those_of_transformers(
    tmp_path: Path, query_rank: int | None, precision: str
) -> None:
    case = dense_case(q_lora_rank=query_rank)
    case.write_checkpoint(tmp_path)
    reference = case.load_reference(tmp_path).to(DEVICE)
    args = parse("--hf-checkpoint", str(tmp_path), *case.flags(tmp_path), precision)
    start_single_process(args)
    model = get_model_provider(args)().to(DEVICE)
    load_hf_weights(args, [model], tmp_path)
    if precision == "--bf16":
        # Both models start from weights that bf16 can represent.
        reference.to(torch.bfloat16).to(torch.float32)
    sequences = [torch.randint(0, case.vocab_size, (length,), device=DEVICE) for length in LENGTHS]

    def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
        return logits[:-1, : case.vocab_size].float().log_softmax(-1).gather(1, tokens[1:, None])[:, 0]

    expected = torch.cat([log_probs(reference(s[None]).logits[0], s) for s in sequences])
    actual = torch.cat([log_probs(x, s) for x, s in zip(packed_logits(model, sequences), sequences, strict=True)])
    weight = torch.linspace(0.5, 1.5, expected.numel(), device=DEVICE)
    (expected_loss := -(expected * weight).mean()).backward()
    (actual_loss := -(actual * weight).mean()).backward()
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    gradients: dict[str, Tensor] = {}
    for name, shard in iter_global_parameters([model]):
        gradients.update(convert_to_hf(args, "deepseek_v3", name, shard.parameter.grad))
    global_norm = torch.cat([grad.flatten() for grad in wanted.values()]).norm()
    errors = {
        name: ((gradients[name].float() - grad).norm() / max(grad.norm(), 1e-3 * global_norm)).item()
        for name, grad in wanted.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    loss_error = float(abs(actual_loss - expected_loss) / abs(expected_loss))
    print(f"query rank {query_rank} {precision}: loss {loss_error:.1e}, worst gradient {worst} {errors[worst]:.1e}")
    loss_bound, grad_bound = (1e-5, 1e-4) if precision == "--fp32" else (3e-3, 5e-2)
    assert loss_error <= loss_bound
    assert errors[worst] <= grad_bound, worst
