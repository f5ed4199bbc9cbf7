"""Trainers push both ways to an engine in a process of its own, which then computes the trainer's log-probs.

The engine here is a transformers model that loads what arrives, unpacked by SGLang's own code; its weights start as
NaN, so a tensor that is not pushed shows.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "dist"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from fake_engine import OURS, FakeEngine, NoEngine
from trainer_case import cut, make_args, make_train_data, new_updater, run_workers, start_worker, write_model

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]

TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
SMALL_BUCKETS = ("--update-weight-buffer-size", "20000")
BUCKET_VERBS = {
    "shared": "receive_weight_buckets",
    "broadcast": "receive_weight_bucket",
    "stock shared": "update_weights_from_tensor",
    "stock broadcast": "update_weights_from_distributed",
}
CARRIERS = ("shared", "broadcast")
PIPELINE = ("--pipeline-model-parallel-size", "2")
LAYOUTS = {
    "two stages": PIPELINE,
    "two virtual stages on each of two ranks": (*PIPELINE, "--num-virtual-stages-per-pipeline-rank", "2"),
    "experts on two ranks": ("--expert-model-parallel-size", "2"),
}
FAULTS = ("forgets commit", "refuses receive:before", "differs", "loses a tensor")


def push_every_way(rank: int, world_size: int, port: int, folder: str) -> dict[str, Any]:
    """Push through shared memory and by broadcast, before and after a step; then to an engine with faults."""
    from slime.backends.sglang_utils import cpu_shim
    from slime.utils.errors import WeightSyncError

    cpu_shim.install()
    args = make_args(
        Path(folder), "--actor-num-gpus-per-node", world_size, *TENSOR, *SMALL_BUCKETS, "--check-weight-update-equal"
    )
    engine = (FakeEngine if rank == 0 else NoEngine)(folder, num_gpus=world_size, is_colocated=True)
    worker = start_worker(args, rank, world_size, port)
    train_data = make_train_data()
    rank_data = cut(args, train_data, worker.get_parallel_config())[0]
    result: dict[str, Any] = {"messages": []}
    try:
        for carrier in BUCKET_VERBS:
            engine.loaders = () if "stock" in carrier else OURS
            args.check_weight_update_equal = "stock" not in carrier  # the plain push compares nothing
            args.colocate = engine.is_colocated = "shared" in carrier  # with --debug-train-only no flag can say it
            engine.num_gpus = world_size if args.colocate else 1
            worker._updater = new_updater(worker)
            engine.calls.clear()
            worker.connect_rollout_engines([engine], 1)
            differences = [push_and_compare(worker, engine, rank_data, train_data)]
            metrics = worker.train(0, rank_data)
            differences.append(push_and_compare(worker, engine, rank_data, train_data))
            result[carrier] = {"differences": differences, "calls": list(engine.calls), "is_main": metrics is not None}
        args.colocate = engine.is_colocated = args.check_weight_update_equal = True
        engine.loaders = OURS
        engine.num_gpus = world_size
        worker._updater = new_updater(worker)
        worker.connect_rollout_engines([engine], 1)
        for engine.fault in FAULTS:
            with pytest.raises(WeightSyncError) as caught:
                worker.update_weights()
            result["messages"].append(str(caught.value))
        engine.fault = ""
        result["served"] = [log_probs_after(worker, engine, loaders, train_data) for loaders in ((), OURS)]
        engine.loaders, engine.fault = (), "refuses load:before"
        worker._updater = new_updater(worker)
        worker.connect_rollout_engines([engine], 1)
        with pytest.raises(WeightSyncError) as caught:
            worker.update_weights()
        result["plain failure"] = str(caught.value)
        return result
    finally:
        engine.close()


def log_probs_after(worker: Any, engine: Any, loaders: tuple[str, ...], train_data: dict[str, Any]) -> list[Any]:
    """Push the weights of now the plain way or verified, and give the engine's log-probs, on rank 0."""
    worker.args.colocate = engine.is_colocated = True
    worker.args.check_weight_update_equal = False
    engine.loaders, engine.num_gpus = loaders, worker.world_size
    worker._updater = new_updater(worker)
    worker.connect_rollout_engines([engine], 1)
    worker.update_weights()
    if isinstance(engine, NoEngine):
        return []
    return engine.log_probs(train_data["tokens"], train_data["response_lengths"])


def push_from_layouts(rank: int, world_size: int, port: int, folder: str) -> dict[str, float]:
    """From each layout both ways, before and after a step; every rank reaches the engine, as every stage may have to.

    Gives the largest difference in log-probs of each.
    """
    import torch.distributed as dist

    from slime.backends.sglang_utils import cpu_shim

    cpu_shim.install()
    engine = FakeEngine(
        folder if rank == 0 else None, num_gpus=world_size, is_colocated=True, address=f"{folder}/engine"
    )
    train_data = make_train_data()
    result: dict[str, float] = {}
    try:
        for layout, flags in LAYOUTS.items():
            args = make_args(
                *(Path(folder), "--actor-num-gpus-per-node", world_size),
                *(*flags, *SMALL_BUCKETS, "--check-weight-update-equal"),
            )
            worker = start_worker(args, rank, world_size, port)
            parallel = worker.get_parallel_config()
            rank_data = cut(args, train_data, parallel)[parallel["dp_rank"]]
            for carrier in CARRIERS:
                args.colocate = engine.is_colocated = carrier == "shared"
                engine.num_gpus = world_size if args.colocate else 1
                worker._updater = new_updater(worker)
                worker.connect_rollout_engines([engine], 1)
                before = push_and_compare(worker, engine, rank_data, train_data)
                worker.train(0, rank_data)
                after = push_and_compare(worker, engine, rank_data, train_data)
                result[f"{layout}, {carrier}"] = max(before, after)
                if carrier == "broadcast":  # the next layout's groups have the same names
                    worker._updater.close()
        dist.barrier()  # rank 0 ends the engine, which the other may still ask
        return result
    finally:
        engine.close()


def push_and_compare(worker: Any, engine: Any, rank_data: Any, train_data: dict[str, Any]) -> float:
    """Push, and give the largest difference between the trainer's and the engine's log-probs, where there are any."""
    from slime.backends.megatron_utils.data import get_data_iterator, prepare_rollout_data
    from slime.backends.megatron_utils.forward import forward_only
    from slime.backends.megatron_utils.log_probs import get_log_probs_and_entropy

    worker.update_weights()
    data = prepare_rollout_data(rank_data)
    iterators = get_data_iterator(data, len(worker.model))
    ours = forward_only(get_log_probs_and_entropy, worker.args, worker.model, iterators, data["num_microbatches"])
    if isinstance(engine, NoEngine) or not ours:
        return 0.0
    theirs = engine.log_probs(train_data["tokens"], train_data["response_lengths"])
    return max(
        float((log_prob - theirs[position]).abs().max())
        for log_prob, position in zip(ours["log_probs"], data["partition"], strict=True)
    )


Pushed = tuple[dict[str, Any], dict[str, float]]


def push_all(rank: int, world_size: int, port: int, dense: str, experts: str) -> Pushed:
    return push_every_way(rank, world_size, port, dense), push_from_layouts(rank, world_size, port, experts)


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> list[Pushed]:
    """What each rank found; one start of two ranks serves all tests here."""
    dense, experts = tmp_path_factory.mktemp("hf"), tmp_path_factory.mktemp("moe")
    write_model(dense)
    write_model(experts, "qwen3_moe", num_hidden_layers=4)
    return run_workers(push_all, 2, str(dense), str(experts), timeout_s=480)


@pytest.fixture(scope="module")
def ranks(pushed: list[Pushed]) -> list[dict[str, Any]]:
    return [every_way for every_way, _ in pushed]


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_engine_computes_the_log_probs_of_a_trainer_in_stages_or_with_experts_apart(
    pushed: list[Pushed], layout: str, carrier: str
) -> None:
    differences = [layouts[f"{layout}, {carrier}"] for _, layouts in pushed]
    assert max(differences) < 2e-5


@pytest.mark.parametrize("carrier", BUCKET_VERBS)
def test_the_engine_computes_the_trainers_log_probs(ranks: list[dict[str, Any]], carrier: str) -> None:
    assert max(ranks[0][carrier]["differences"]) < 2e-5


@pytest.mark.parametrize("carrier", CARRIERS)
def test_nobody_hears_the_new_version_before_every_digest_is_acknowledged(
    ranks: list[dict[str, Any]], carrier: str
) -> None:
    calls = [name.replace("_buckets", "_bucket") for name, _ in ranks[0][carrier]["calls"]]
    first = calls[calls.index("pause_generation") : calls.index("continue_generation") + 1]
    assert first[:2] == ["pause_generation", "flush_cache"]
    assert first.count("receive_weight_bucket") >= 5, "a small buffer makes several buckets"
    steps = [name for name in first if name not in ("receive_weight_bucket", "run_weight_check")]
    join = [] if carrier == "shared" else ["join_weight_group"]
    assert steps[2:] == [
        *(
            "begin_weight_update",
            "begin_weight_update",
            *join,
            "acknowledge_weight_update",
            "commit_weight_update",
            "get_weight_version",
        ),
        "continue_generation",
    ]
    last_bucket = len(first) - 1 - first[::-1].index("receive_weight_bucket")
    assert last_bucket < first.index("acknowledge_weight_update")


def test_a_buffer_is_mapped_once_and_a_manifest_told_once(ranks: list[dict[str, Any]]) -> None:
    calls = ranks[0]["shared"]["calls"]
    handles = {
        handle
        for name, details in calls
        if name == "receive_weight_buckets"
        for of_gpus in details["arguments"][1].values()
        for handle in of_gpus
    }
    assert len(handles) <= 2 * 2, "two ranks, whose buffers two GPUs read"
    told = [details["arguments"][2] is not None for name, details in calls if name == "begin_weight_update"]
    assert told == [False, True, False], "asked by name, told, and known in the second push"


@pytest.mark.parametrize("carrier", CARRIERS)
def test_each_push_has_the_next_version(ranks: list[dict[str, Any]], carrier: str) -> None:
    calls = ranks[0][carrier]["calls"]
    commits = [details["arguments"] for name, details in calls if name == "commit_weight_update"]
    assert [version for _, version in commits] == ["1", "2"]
    assert len({push_id for push_id, _ in commits}) == 2


@pytest.mark.parametrize("carrier", ["stock shared", "stock broadcast"])
def test_an_engine_without_our_loader_gets_its_buckets_through_sglangs_own_endpoints(
    ranks: list[dict[str, Any]], carrier: str
) -> None:
    calls = ranks[0][carrier]["calls"]
    assert not {name for name, _ in calls} & {"begin_weight_update", "receive_weight_bucket", "commit_weight_update"}
    buckets = [details for name, details in calls if name == BUCKET_VERBS[carrier]]
    sent = [details["weight_version"] for details in buckets if details["load_format"] == "flattened_bucket"]
    assert set(sent) == {"1", "2"}
    assert len(sent) >= 10


def test_an_engine_serves_the_same_after_a_plain_push_as_after_a_verified_one(ranks: list[dict[str, Any]]) -> None:
    plain, verified = ranks[0]["served"]
    assert len(plain) > 0
    assert all(one.tolist() == other.tolist() for one, other in zip(plain, verified, strict=True))


def test_a_plain_push_names_the_engine_that_failed_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["plain failure"] == ranks[1]["plain failure"]
    assert "engine 0: WeightSyncError: out of memory (while loading a bucket)" in ranks[0]["plain failure"]


def test_a_failed_push_is_the_same_error_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["messages"] == ranks[1]["messages"]
    stale, refused, differs, lost = ranks[0]["messages"]
    assert "no engine took weight version 1" in stale
    assert "it holds version '2' after the push of version '1'" in stale
    assert "out of memory (while loading buckets 0 and 1)" in refused
    assert "comparing the tensors of version 3" in differs
    assert "model.norm.weight" in differs
    assert "looking for weights that were not sent" in lost
    assert "never pushed: ['model.norm.weight']" in lost
