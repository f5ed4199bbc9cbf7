"""Adapters in parallel layouts against one process; adapter checkpoints; the reference without adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.dist.trainer_case import cut, make_args, make_train_data, run_workers, start_worker, write_model
from tests.matrix.case import load_cases
from tests.matrix.layouts import run_layouts
from tests.matrix.report import summary

pytestmark = pytest.mark.dist

LORA = ("--lora-rank", 4, "--lora-alpha", 6, "--moe-router-bias-update-rate", 0)
LAYOUTS = {
    ("qwen3", "each"): ["TP2", "TP2 SP recompute", "PP2 uneven", "CP2"],
    ("deepseek_v3", "each"): ["TP2 SP", "EP2"],
    ("qwen3_moe", "each"): ["TP2 ETP2 SP"],
    ("qwen3_moe", "shared"): ["EP2", "TP2 EP2 SP", "TP2 ETP1 SP", "TP2 ETP2 SP"],
}


@pytest.mark.parametrize(("family", "experts"), LAYOUTS)
def test_loss_gradients_and_push_of_adapters_do_not_depend_on_the_layout(family: str, experts: str) -> None:
    layouts = LAYOUTS[family, experts]
    cells = run_layouts([load_cases([family])[family]], layouts, loss_flags=(*LORA, "--lora-experts", experts))
    assert len(cells) == len(layouts)
    assert all(cell.passed for cell in cells), summary(cells)


KL = ("--use-kl-loss", "--kl-loss-coef", 0.05, "--kl-loss-type", "k3", "--lora-rank", 4, "--lora-dropout", 0)


def train(
    rank: int, world_size: int, port: int, model: str, flags: tuple[object, ...], rollouts: tuple[int, ...]
) -> tuple[list[dict[str, float]], int] | None:
    """Metrics of the rollouts, each of which is saved, and the bytes of trained parameters on this rank."""
    from slime.backends.megatron_utils.train_metrics import is_main_rank

    args = make_args(Path(model), "--actor-num-gpus-per-node", world_size, *KL, *flags)
    worker = start_worker(args, rank, world_size, port, with_ref=True)
    parallel = worker.get_parallel_config()
    rank_data = cut(args, make_train_data(), parallel)[parallel["dp_rank"]]
    metrics = []
    for rollout_id in rollouts:
        metrics.append(worker.train(rollout_id, rank_data))
        if args.save:
            worker.save_model(rollout_id)
            worker.publish_checkpoint(rollout_id)
    trained = sum(p.numel() for chunk in worker.model for p in chunk.parameters() if p.requires_grad)
    return ([*metrics], trained) if is_main_rank() else None


def only(ranks: list[Any]) -> Any:
    (result,) = [result for result in ranks if result is not None]
    return result


def test_a_run_resumes_from_its_adapters_in_another_layout(tmp_path: Path) -> None:
    write_model(tmp_path / "hf")
    hf, save = str(tmp_path / "hf"), str(tmp_path / "save")
    saving = ("--save", save, "--save-interval", 1, "--save-hf", tmp_path / "merged_{rollout_id}")
    saving += ("--lora-save", tmp_path / "peft_{rollout_id}")
    (first, *others), trained = only(run_workers(train, 1, hf, saving, (0, 1, 2), timeout_s=250))

    # The reference is the model without adapters, which contribute nothing before the first step.
    assert first["train/kl_loss"] < 1e-9
    assert others[0]["train/kl_loss"] > 1e-5
    # Two vectors of rank 4 for each of the seven matrices of a layer, and nothing else.
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = (config["head_dim"] * config[f"num_{x}_heads"] for x in ("attention", "key_value"))
    shapes = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    shapes += [(inner, hidden), (inner, hidden), (hidden, inner)]
    assert trained == config["num_hidden_layers"] * sum(4 * (rows + columns) for rows, columns in shapes)
    # The checkpoint of the first rollout, and a resume from it in another layout.
    (Path(save) / "latest_checkpointed_iteration.txt").write_text("0")
    resumed = ("--load", save, "--tensor-model-parallel-size", 2, "--sequence-parallel")
    again, _ = only(run_workers(train, 2, hf, resumed, (1, 2), timeout_s=250))
    for ours, theirs in zip(again, others, strict=True):
        for name in ("train/loss", "train/kl_loss", "train/grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name
    # Merged weights are base weights plus the adapters of PEFT's folder.
    base, merged = load_file(tmp_path / "hf" / "model.safetensors"), {}
    for path in (tmp_path / "merged_2").glob("*.safetensors"):
        merged |= load_file(path)
    adapter = load_file(tmp_path / "peft_2" / "adapter_model.safetensors")
    moved = 0
    for name, weight in base.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{prefix}A.weight" in adapter:
            weight = weight + 2 * adapter[f"{prefix}B.weight"] @ adapter[f"{prefix}A.weight"]
            moved += 1
        assert torch.allclose(merged[name].float(), weight, rtol=1e-2, atol=1e-5), name  # bf16
    assert moved == 7 * config["num_hidden_layers"]
    assert all(adapter[name].any() for name in adapter)
