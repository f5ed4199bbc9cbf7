"""fp32 tensors of a checkpoint stay fp32, and a narrower push reports what it loses."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from slime.backends.megatron_utils import initialize
from slime.backends.megatron_utils.checkpoint import load_checkpoint, publish_checkpoint, save_checkpoint
from slime.backends.megatron_utils.checkpoints.optimizer_state import own_tensors
from slime.backends.megatron_utils.hf_checkpoint_saver import save_hf_model_to_path
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.model import build_model, build_optimizer, build_scheduler
from slime.backends.megatron_utils.update_weight.cast_loss import CastLossEstimate
from tests.matrix import case as matrix_case
from tests.matrix import trainer
from tests.matrix.batch import make_train_data
from tests.matrix.case import FamilyCase, load_cases, read_tensors, write_bf16_copy
from tests.matrix.parity import one_process_world


def test_the_loss_is_counted_by_hand() -> None:
    """Of four weights, one is unchanged, one changes too little for bf16, and two change enough."""
    model = torch.nn.Linear(4, 1, bias=False)
    model.weight.data = torch.tensor([[1.0, 1.0, 1.0, 1.0]])
    estimate = CastLossEstimate([model], torch.bfloat16)
    assert estimate.compare(None) is None
    model.weight.data += torch.tensor([[0.0, 1e-3, 1e-2, 1.0]])
    loss = estimate.compare(None)
    assert loss is not None
    assert (loss.num_moved, loss.num_lost) == (3, 1)
    assert loss.share == pytest.approx(1 / 3)


FP32_OF = {
    "qwen3_next": ("linear_attn.A_log", "linear_attn.norm.weight", "linear_attn.dt_bias"),
    "qwen3_5_moe": ("linear_attn.A_log", "linear_attn.norm.weight", "linear_attn.conv1d.weight"),
    "minimax_m2": ("block_sparse_moe.gate.weight", "e_score_correction_bias", "q_norm.weight", "model.norm.weight"),
    "deepseek_v32": (
        "weights_proj.weight",
        "indexer.k_norm.weight",
        "e_score_correction_bias",
        "input_layernorm.weight",
    ),
    "glm4_moe-groups": ("e_score_correction_bias", "mlp.gate.weight", "input_layernorm.weight", "k_norm.weight"),
    "nemotron_h": (
        *("mixer.A_log", "mixer.D", "mixer.dt_bias", "conv1d.bias", "mixer.norm.weight"),
        *("mixer.gate.weight", "e_score_correction_bias"),
    ),
    "gpt_oss": ("self_attn.sinks", "mlp.router.weight", "mlp.router.bias"),
}
"""Families, and the tensors that a bf16 folder holds in fp32: as published, or as any folder may."""


def test_engines_get_in_fp32_what_they_hold_in_fp32_from_a_folder_in_fp32_too(tmp_path: Path) -> None:
    case = load_cases(["qwen3_5"])["qwen3_5"]
    case.write_checkpoint(tmp_path)
    with one_process_world():
        args, model = trained_in_bf16(case, tmp_path)
        pushed = {name: tensor.dtype for name, tensor in trainer.export(args, model, dtype=torch.bfloat16)}
    wide = {name for name, dtype in pushed.items() if dtype == torch.float32}
    assert wide == {name for name in pushed if name.endswith("linear_attn.A_log")} and len(wide) == 4


def trained_in_bf16(case: FamilyCase, folder: Path, *flags: object) -> tuple[Namespace, list[torch.nn.Module]]:
    args = trainer.make_args(case, folder, "--bf16", *flags)
    initialize.init(args)
    model = build_model(args)
    load_hf_weights(args, model, folder)
    return args, model


@pytest.mark.parametrize("family", FP32_OF)
def test_what_a_bf16_folder_has_in_fp32_stays_so_in_model_push_and_export(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = load_cases([family])[family]
    case.write_checkpoint(tmp_path / "fp32")
    monkeypatch.setattr(matrix_case, "FP32_IN_BF16_CHECKPOINTS", FP32_OF[family])
    write_bf16_copy(tmp_path / "fp32", tmp_path / "hf")
    source = case.read_pushed(tmp_path / "hf")
    assert {name for name, tensor in source.items() if tensor.dtype == torch.float32}
    with one_process_world():
        args, model = trained_in_bf16(case, tmp_path / "hf")
        pushed = {name: tensor.clone() for name, tensor in trainer.export(args, model, dtype=torch.bfloat16)}
        assert not {name: (tensor.dtype, pushed[name].dtype) for name, tensor in source.items() if name in pushed
                    and (tensor.dtype != pushed[name].dtype or not torch.equal(tensor, pushed[name]))}  # fmt: skip
        save_hf_model_to_path(args, tmp_path / "export", model)
        written, stored = read_tensors(tmp_path / "export"), read_tensors(tmp_path / "hf")
        assert written.keys() == stored.keys()
        assert not [name for name, tensor in stored.items()
                    if written[name].dtype != tensor.dtype or not torch.equal(written[name], tensor)]  # fmt: skip
        optimizer = build_optimizer(args, model)
        data = trainer.prepare(args, make_train_data(case.vocab_size, add_images=case.add_images))
        trainer.run_backward(args, model, data)
        optimizer.step()
        after = dict(trainer.export(args, model, dtype=torch.bfloat16))
        wide = [name for name in source if source[name].dtype == torch.float32 and "bias" not in name]
        moved = [name for name in wide if name in after and not torch.equal(after[name], source[name])]
        assert moved and all((after[name] != after[name].bfloat16().float()).any() for name in moved)


def test_a_resume_gives_each_parameter_its_own_optimizer_state_in_any_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """megatron-core's optimizer sorts a group's fp32 parameters before bf16 ones, wherever they are in it."""
    case = load_cases(["qwen3_5"])["qwen3_5"]
    case.write_checkpoint(tmp_path / "fp32")
    monkeypatch.setattr(matrix_case, "FP32_IN_BF16_CHECKPOINTS", FP32_OF["qwen3_5_moe"])
    write_bf16_copy(tmp_path / "fp32", tmp_path / "hf")
    with one_process_world():
        args, model = trained_in_bf16(case, tmp_path / "hf", "--save", tmp_path / "saves", "--save-interval", 1)
        optimizer = build_optimizer(args, model)
        data = trainer.prepare(args, make_train_data(case.vocab_size, add_images=case.add_images))
        trainer.run_backward(args, model, data)
        optimizer.step()
        save_checkpoint(args, 0, model, optimizer, build_scheduler(args, optimizer))
        publish_checkpoint(args.save, 0)
        resumed = build_model(args)
        args = Namespace(**{**vars(args), "load": args.save, "finetune": False, "no_load_optim": False})
        again = build_optimizer(args, resumed)
        load_checkpoint(args, resumed, again, build_scheduler(args, again))
        ours, theirs = own_tensors(optimizer), own_tensors(again)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        for parameter, other in zip(model[0].parameters(), resumed[0].parameters(), strict=True):
            assert torch.equal(parameter, other)
