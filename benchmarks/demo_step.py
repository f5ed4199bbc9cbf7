"""The demo job's flags, engine and trainer in one process without Ray, for the benchmarks."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.model_shapes import model_flags
from benchmarks.phase_table import Stopwatch
from examples.tiny_arithmetic import task
from examples.tiny_arithmetic.reward import END_OF_TURN
from slime.backends.megatron_utils.actor import MegatronTrainRayActor
from slime.backends.sglang_utils.router_process import start_router
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.compose import parse_args, parts
from slime.ext.fast_push.loaders import RECEIVER
from slime.flags.parse import record_runtime
from slime.observability.logging_utils import init_tracking
from slime.utils import env
from slime.utils.net import find_available_port, get_free_port
from slime.utils.types import Sample
from slime.weights.push.engine import EngineProxy

RESPONSE_TOKENS = 32
SEED = 1
START_TIMEOUT_S = 600.0


def demo_args(folder: Path, num_prompts: int, num_samples: int, more: Sequence[str]) -> Namespace:
    """The flags of scripts/run-tiny-cpu.sh that matter within a step."""
    hf, data = folder / "task/hf", folder / "task/data/grpo.jsonl"
    flags = f"""
        --actor-num-nodes 1 --actor-num-gpus-per-node 1 --colocate --rollout-num-gpus-per-engine 1
        --hf-checkpoint {hf} --ref-load {hf} --save {folder}/run --save-interval 1000000 --use-tensorboard
        --prompt-data {data} --input-key prompt --label-key label --apply-chat-template
        --rollout-shuffle --rollout-seed {SEED} --seed {SEED}
        --custom-rm-path examples.tiny_arithmetic.reward.reward
        --num-rollout 1000 --rollout-batch-size {num_prompts} --n-samples-per-prompt {num_samples}
        --rollout-max-response-len {RESPONSE_TOKENS} --rollout-temperature 1
        --global-batch-size {num_prompts * num_samples} --balance-data
        --use-dynamic-batch-size --max-tokens-per-gpu 4096
        --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl
        --entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28
        --optimizer adam --lr 1e-3 --lr-decay-style constant --weight-decay 0.1
        --adam-beta1 0.9 --adam-beta2 0.98 --clip-grad 1.0
        --sglang-server-concurrency 256 --attention-dropout 0.0 --hidden-dropout 0.0
        --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
    """
    env.export({"TENSORBOARD_DIR": str(folder / "tensorboard")})
    args = parse_args(argv=[*model_flags("tiny-arithmetic"), *flags.split(), *more])
    record_runtime(args, **init_tracking(args))
    return args


def start_engine(args: Namespace, undo: ExitStack) -> SGLangEngine:
    """One engine behind a router; ``args`` gets the router's address, ``undo`` ends both."""
    first = random.randint(21000, 30000)  # independent of SEED: two benchmarks may start at once
    router = start_router(
        args, host="127.0.0.1", port=get_free_port(first), prometheus_port=find_available_port(first)
    )
    undo.callback(router.stop)
    record_runtime(args, sglang_router_ip=router.host, sglang_router_port=router.port)
    first_gpu = (env.cuda_visible_devices() or ["0"])[0]
    engine = SGLangEngine(args, rank=0, base_gpu_id=int(first_gpu))
    undo.callback(engine.shutdown)
    port = get_free_port(first + 1000, consecutive=3)
    engine.init(
        host="127.0.0.1",
        port=port,
        nccl_port=port + 1,
        dist_init_addr=f"127.0.0.1:{port + 2}",
        router_ip=router.host,
        router_port=router.port,
        timeout_s=START_TIMEOUT_S,
    )
    return engine


def start_trainer(args: Namespace, undo: ExitStack) -> MegatronTrainRayActor:
    """One Megatron rank in this process, with as many threads as in the job."""
    torch.set_num_threads(os.cpu_count() or 1)
    actor = MegatronTrainRayActor()
    actor.set_rendezvous(1, 0, "127.0.0.1", get_free_port(random.randint(20000, 21000)))
    transport = parts(args).transport
    actor.init(args, "actor", with_ref=True, transport=transport and transport.load())
    undo.callback(dist.destroy_process_group)
    return actor


class InProcessEngine(EngineProxy):
    """The engine as a weight push sees it.  Each request runs in a thread and is timed by name."""

    index, num_gpus, gpu_offset, is_colocated, loaders = 0, 1, 0, True, (RECEIVER,)

    def __init__(self, engine: SGLangEngine, pool: ThreadPoolExecutor, watch: Stopwatch) -> None:
        self._engine, self._pool, self._watch = engine, pool, watch

    def start(self, method: str, /, *arguments: Any, **keywords: Any) -> Pending:
        """Call the method on a thread."""
        return self._timed(method, lambda: getattr(self._engine, method)(*arguments, **keywords))

    def run(self, function: Callable[..., Any], /, *arguments: Any, on_all_nodes: bool = False) -> Pending:
        """Call the function on a thread."""
        return self._timed(function.__name__, lambda: function(self._engine, *arguments))

    def _timed(self, name: str, call: Callable[[], Any]) -> Pending:
        def ask() -> Any:
            with self._watch.time(name):
                return call()

        return Pending(self._pool.submit(ask))


class Pending:
    """A running request."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self, timeout_s: float) -> Any:
        """The engine's answer."""
        return self._future.result(timeout_s)


def worked_samples(num_samples: int) -> list[Sample]:
    """Answers like those of the demo's policy, 60 % of them right; answers of a fixed length cannot be graded."""
    rng = random.Random(SEED)
    samples = []
    for _ in range(num_samples):
        operands = tuple(rng.randrange(10) for _ in range(task.NUM_OPERANDS))
        slip = 0 if rng.random() < 0.6 else 1
        label = str((int(task.answer(operands)) + slip) % 10)
        response = task.worked_answer(operands, rng) + END_OF_TURN
        samples.append(Sample(response=response, label=label, status=Sample.Status.COMPLETED))
    return samples


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="slime-step-phases-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def timed(function: Callable[..., Any], *arguments: Any) -> float:
    """The seconds that a call takes."""
    started = perf_counter()
    function(*arguments)
    return perf_counter() - started
