"""Adapters of many clients on several ranks against one, and loading one layout's states in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.dist.trainer_case import make_args, run_workers, start_worker, write_model

pytestmark = [pytest.mark.dist, pytest.mark.whole]

FLAGS = ("--lora-rank", 4, "--num-rollout", 0, "--max-tokens-per-gpu", 40)
TP2 = ("--tensor-model-parallel-size", 2)


def life(
    rank: int, world_size: int, port: int, model: str, flags: tuple[object, ...], saved: str, loaded: str
) -> tuple[list[Any], dict[str, Any]] | None:
    """Two clients of a trainer: rank 0's results of their passes, norms and last numbers."""
    from slime.ext.training_api.adapter_trainer import AdapterTrainer
    from slime.ext.training_api.backend import AdamParams, LoraSpec
    from tests.ext.training_api.test_trainer import request

    args = make_args(Path(model), "--actor-num-gpus-per-node", world_size, *FLAGS, *flags)
    worker = start_worker(args, rank, world_size, port)
    trainer = AdapterTrainer(args, worker.model, packs_clients=args.training_api_pack_clients)
    found: list[Any] = []

    def note(outputs: Any) -> None:
        everyone: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(everyone, outputs[0])
        joined = {index: one for part in everyone for index, one in part.items()}
        found.extend(joined[index]["logprobs"] for index in sorted(joined))

    trainer.add("a", LoraSpec(4, seed=3))
    trainer.add("b", LoraSpec(2, seed=4, train_attn=False))
    for seed in range(2):
        for name, loss in (("a", "cross_entropy"), ("b", "importance_sampling"), ("a", "ppo")):
            note(trainer.run([request(name, loss, seed=seed)]))
        note(trainer.run([request("b", seed=seed, lengths=(7,))]))  # fewer data than ranks
        for name in ("a", "b"):
            adam = AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)
            found.append(np.array(trainer.step(name, adam)["grad_norm"]))
    trainer.save("b", Path(saved), with_optimizer=True)
    torch.distributed.barrier()
    trainer.remove("a")
    trainer.add("c", LoraSpec(2, seed=5))
    trainer.load("c", Path(loaded or saved), with_optimizer=True)
    state = trainer._states["c"]
    numbers = {"steps": state.num_steps}
    for name, flat in (("values", state.values), *state.moments.items()):
        peft = trainer._adapters.as_peft(trainer.model, trainer._by_key(flat), rank=2)
        numbers |= {f"{name} {key}": tensor.numpy() for key, tensor in peft.items()}
    return (found, numbers) if rank == 0 else None


@pytest.mark.timeout(600)
def test_passes_steps_and_states_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    write_model(tmp_path / "hf")
    hf, first = str(tmp_path / "hf"), str(tmp_path / "first")
    ((alone, numbers),) = run_workers(life, 1, hf, (), first, "")
    packed = ("--training-api-pack-clients",)
    for name, flags in (("DP2", ()), ("DP2 packed", packed), ("TP2", TP2), ("TP2 SP", (*TP2, "--sequence-parallel"))):
        (result, _) = run_workers(life, 2, hf, flags, str(tmp_path / name), first)
        found, read = result
        for one, other in zip(found, alone, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5, err_msg=name)
        # A state written by one rank is bitwise the same on two.
        assert read.keys() == numbers.keys()
        for key, value in numbers.items():
            np.testing.assert_array_equal(read[key], value, err_msg=f"{name} {key}")
