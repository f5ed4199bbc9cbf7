"""The result of an optimizer step does not depend on packing; a diverging rank is named.

The whole actor runs on one rollout: ragged samples, masks with holes, one sample without a trained token.  The matrix
compares layouts of ranks.
"""

from __future__ import annotations

from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.dist.trainer_case import cut, make_args, make_train_data, run_workers, write_model

pytestmark = pytest.mark.dist

COMMON = ("--use-kl-loss", "--kl-loss-coef", "0.05", "--kl-loss-type", "k3", "--entropy-coef", "0.01")
PER_TOKEN = "--calculate-per-token-loss"

# packing of the one-process world -> flags
PACKINGS: dict[str, tuple[str, ...]] = {
    "packed to 40 tokens": (),
    "packed to 1000 tokens": ("--max-tokens-per-gpu", "1000"),
    "padded to 32": ("--data-pad-size-multiplier", "32"),
    "log-probs in chunks of 3": ("--log-probs-chunk-size", "3"),
    "loss recomputed": ("--recompute-loss-function",),
}


def full_gradients(args: Namespace, rank_data: Any) -> dict[str, list[float]]:
    """Gradient of every parameter, complete, by global name: one accumulation without a sharded optimizer."""
    import torch
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.utils import unwrap_model

    from slime.backends.megatron_utils.advantages import compute_advantages_and_returns
    from slime.backends.megatron_utils.checkpoint import load_checkpoint
    from slime.backends.megatron_utils.data import get_data_iterator, prepare_rollout_data
    from slime.backends.megatron_utils.forward import forward_only
    from slime.backends.megatron_utils.log_probs import get_log_probs_and_entropy
    from slime.backends.megatron_utils.model import build_model
    from slime.backends.megatron_utils.parameters import iter_shards
    from slime.backends.megatron_utils.train_step import accumulate_gradients
    from slime.backends.megatron_utils.update_weight.gather import gather_tensor_parallel

    whole_buffers = Namespace(**{**vars(args), "use_distributed_optimizer": False})
    model = build_model(whole_buffers)
    load_checkpoint(args, model)
    config = unwrap_model(model[0]).config
    config.finalize_model_grads_func = finalize_model_grads
    data = prepare_rollout_data(rank_data)
    iterators = get_data_iterator(data, 1)
    reference = forward_only(get_log_probs_and_entropy, args, model, iterators, data["num_microbatches"], "ref_")
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(4096, generator=generator)
    # A reference and an old policy that differ from the present one, so that every term has a gradient.
    offsets = [128 * position for position in data["partition"]]
    data["ref_log_probs"] = [
        log_prob + 0.3 * noise[start : start + len(log_prob)]
        for log_prob, start in zip(reference["ref_log_probs"], offsets, strict=True)
    ]
    data["log_probs"] = [
        log_prob + 0.2 * noise[start + 64 : start + 64 + len(log_prob)]
        for log_prob, start in zip(reference["ref_log_probs"], offsets, strict=True)
    ]
    compute_advantages_and_returns(args, data)
    iterators[0].reset()
    for chunk in model:
        chunk.zero_grad_buffer()
        chunk.train()
    accumulate_gradients(
        args, "test", iterators, model, data["num_microbatches"][0], data["global_batch_sizes"][0],
        loss_type="policy_loss",
    )  # fmt: skip
    return {
        shard.name: gather_tensor_parallel(shard, shard.parameter.main_grad, is_gated=True).flatten().tolist()
        for shard in iter_shards(model)
    }


def run_layout(rank: int, world_size: int, port: int, folder: str, variants: list[tuple[str, ...]]) -> list[Any]:
    """For each variant of flags: gradients, and what two rollouts of training report and end with."""
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor
    from slime.backends.megatron_utils.train_metrics import is_main_rank
    from slime.backends.megatron_utils.update_weight.gather import iter_full_tensors

    results = []
    for variant in variants:
        args = make_args(Path(folder), "--actor-num-gpus-per-node", world_size, *COMMON, *variant)
        if not results:
            worker = MegatronTrainRayActor()
            worker.set_rendezvous(world_size, rank, "127.0.0.1", port)
            worker.init(args, "actor", with_ref=True)
        else:
            worker = _again(worker, args)
        parallel = worker.get_parallel_config()
        rank_data = cut(args, make_train_data(), parallel)[parallel["dp_rank"]]
        gradients = full_gradients(args, rank_data)
        steps = [worker.train(rollout_id, rank_data) for rollout_id in range(2)]
        parameters = {name: value.flatten().tolist() for name, value in iter_full_tensors(worker.model, dtype=None)}
        results.append((gradients, steps, parameters) if is_main_rank() else None)
    return results


def _again(worker: Any, args: Namespace) -> Any:
    """A second actor in a process whose groups exist: the same initial state, other flags."""
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor

    class Joined(MegatronTrainRayActor):
        def join_process_group(self, cuda_backend: str, timeout: timedelta) -> None:
            pass

    from slime.observability.timer import Timer

    if Timer().is_running("train_wait"):
        Timer().end("train_wait")
    fresh = Joined()
    fresh.rank, fresh.world_size = worker.rank, worker.world_size
    fresh.init(args, "actor", with_ref=True)
    return fresh


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def one_process(model_folder: Path) -> dict[str, Any]:
    variants = [*PACKINGS.values(), (PER_TOKEN,), (PER_TOKEN, "--max-tokens-per-gpu", "1000")]
    names = [*PACKINGS, "per token", "per token, packed to 1000 tokens"]
    return dict(zip(names, run_workers(run_layout, 1, str(model_folder), variants)[0], strict=True))


def relative_errors(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> dict[str, float]:
    """Norm of the difference over that of the parameter, or of a thousandth of the whole where that is larger."""
    import torch

    assert ours.keys() == theirs.keys()
    a = {name: torch.tensor(values, dtype=torch.float64) for name, values in ours.items()}
    b = {name: torch.tensor(values, dtype=torch.float64) for name, values in theirs.items()}
    whole = sum(float(value.square().sum()) for value in b.values()) ** 0.5
    return {name: float((a[name] - b[name]).norm() / max(float(b[name].norm()), 1e-3 * whole)) for name in a}


def check_equal(ours: Any, theirs: Any) -> None:
    (our_gradients, our_steps, our_parameters), (gradients, steps, parameters) = ours, theirs
    worst = relative_errors(our_gradients, gradients)
    assert max(worst.values()) < 1e-5, sorted(worst.items(), key=lambda item: -item[1])[:5]
    for our_step, step in zip(our_steps, steps, strict=True):
        names = [name for name in step if name.startswith(("train/", "rollout/"))]
        assert {name: our_step[name] for name in names} == pytest.approx(
            {name: step[name] for name in names}, rel=1e-5, abs=1e-6
        )
    # Adam's first step is the sign of the gradient, whatever its size: only the sum over many entries is stable.
    assert max(relative_errors(our_parameters, parameters).values()) < 1e-4


@pytest.mark.parametrize("packing", list(PACKINGS)[1:])
def test_a_step_does_not_depend_on_packing(one_process: dict[str, Any], packing: str) -> None:
    check_equal(one_process[packing], one_process["packed to 40 tokens"])


def test_a_per_token_step_does_not_depend_on_packing(one_process: dict[str, Any]) -> None:
    check_equal(one_process["per token, packed to 1000 tokens"], one_process["per token"])


def go_astray(rank: int, world_size: int, port: int, folder: str) -> tuple[str, list[int]]:
    """Two steps: in the first one rank has a loss that is not finite, before the second one its weights change."""
    import torch
    from tests.dist.trainer_case import start_worker

    from slime.utils.errors import StepError

    args = make_args(Path(folder), "--actor-num-gpus-per-node", world_size, "--on-nan", "skip")
    worker = start_worker(args, rank, world_size, port)
    results: list[Any] = []
    worker._reports.step = lambda rollout_id, step_id, result, *_, **__: results.append(result) or {}
    rank_data = cut(args, make_train_data(), worker.get_parallel_config())[rank]
    rewards = list(rank_data.rewards)
    rank_data.rewards[:] = [float("nan") if rank == 1 else reward for reward in rewards]
    worker.train(0, rank_data)
    rank_data.rewards[:] = rewards
    assert not results[0].is_applied
    with torch.no_grad():
        weight = next(weight for weight in worker.model[0].parameters() if weight.requires_grad)
        weight.view(-1)[0] += 1e-3 * rank
    with pytest.raises(StepError) as raised:
        worker.train(1, rank_data)
    return str(raised.value), list(results[0].not_finite_ranks)


def test_a_rank_that_goes_astray_is_named(model_folder: Path) -> None:
    who = "ranks [0, 1] hold weights that differ, of ranks [0, 1]"
    for message, not_finite in run_workers(go_astray, 2, str(model_folder)):
        assert not_finite == [1]
        assert message.startswith(f"rollout 1, optimizer step 0: {who}")
