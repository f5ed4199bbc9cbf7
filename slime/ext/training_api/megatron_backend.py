"""The backend on slime's trainer and engines: a job whose loop is on the clients' side.

The trainer works for one call at a time, in one thread; the engines' adapters change in another.  A rank, an engine or
the manager that dies ends the service, for what it held of clients is gone; saved states are what remains.
"""

from __future__ import annotations

import itertools
import secrets
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from slime.ext.training_api.backend import (
    AdamParams,
    Backend,
    LoraSpec,
    PassRequest,
    PassResult,
    RequestRefused,
    SampleResult,
    SamplingParams,
)
from slime.ext.training_api.engine_sampling import LOAD_ATTEMPTS, EngineSampling, lacks_adapter
from slime.ext.training_api.job_threads import JobThreads
from slime.flags.group import flag_of
from slime.ray.parts import Part, Parts
from slime.ray.save_lock import SaveLock
from slime.ray.train_loop import TrainJob
from slime.ray.waiting import wait_for
from slime.utils.errors import ConfigError, EngineError
from slime.utils.files import read_model_config

SNAPSHOTS = ".snapshots-"
SERVICE_RANKS = Part(
    "slime.ray.actor_group:RayTrainGroup", {"actor_cls": "slime.ext.training_api.trainer_rank:ServiceRank"}
)


def check_service(args: Namespace) -> None:
    """Refuse flags with which a service cannot run.

    Raises:
        ConfigError: names the flag.
    """
    if args.lora_rank is None:
        raise ConfigError("--lora-rank is not given; it is the largest rank that clients may ask for.")
    if args.max_tokens_per_gpu is None:
        raise ConfigError("--max-tokens-per-gpu is not given; give the tokens of a micro-batch, and of a datum.")
    wanted: dict[str, Any] = {
        **{"lora_push": "adapter", "num_rollout": 0, "lora_dropout": 0, "attention_dropout": 0, "hidden_dropout": 0},
        **{"pipeline_model_parallel_size": 1, "context_parallel_size": 1, "expert_model_parallel_size": 1},
        **{"virtual_pipeline_model_parallel_size": None, "lora_load": None, "enable_mtp_training": False},
        **{"offload_train": False, "offload_rollout": False, "debug_train_only": False, "debug_rollout_only": False},
        **{"critic_args": None},
    }
    for name, value in wanted.items():
        if (given := vars(args).get(name, value)) != value:
            raise ConfigError(f"{flag_of(name)} is {given}, and a training service needs {value}; drop the flag.")
    if args.training_api_pack_clients and (args.num_experts or args.tensor_model_parallel_size > 1):
        raise ConfigError(
            f"--training-api-pack-clients is given for a model with {args.num_experts or 0} experts on "
            f"{args.tensor_model_parallel_size} tensor-parallel ranks; it needs a model without experts on one. Drop "
            "the flag: micro-batches then have data of one client each."
        )


def max_length(args: Namespace) -> int:
    """Return the tokens of the longest sequence that engines take."""
    given = vars(args).get("sglang_context_length")
    config = read_model_config(args.hf_checkpoint)
    return int(given or config.get("max_position_embeddings") or args.max_position_embeddings)


class MegatronBackend(Backend):
    """Serves adapters of ``--hf-checkpoint``.

    Args:
        args: complete, see :func:`check_service`.
        parts: those that ``slime.compose`` chose for them.

    Raises:
        SlimeError: trainer or engines do not start.
    """

    def __init__(self, args: Namespace, parts: Parts) -> None:
        check_service(args)
        self.args = args
        self._job = TrainJob(args, replace(parts, train_group=SERVICE_RANKS))
        self._engines = EngineSampling(args, self._job.manager, max_length=max_length(args))
        if args.use_fault_tolerance:
            resumed = self._job.manager.health_monitoring_resume.remote()
            wait_for(resumed, what="the monitors of the engines", timeout_s=args.weight_update_timeout_s)
        self._threads = JobThreads(self._job, self._engines, args.weight_update_timeout_s)
        self._models: dict[str, LoraSpec] = {}
        self._snapshots, self._snapshots_lock = claim_snapshots(Path(args.training_api_dir).absolute())
        """Of adapters that were published and not saved; where engines of other hosts read saved ones too."""
        self._own_folders: dict[str, Path] = {}
        self._numbers = itertools.count()

    # Calls

    def _ranks(self, method: str, *arguments: Any, what: str) -> list[Any]:
        return self._job.actor.on_all("ask", "of_clients", method, *arguments, what=what)

    async def _train(self, method: str, *arguments: Any, what: str) -> list[Any]:
        return await self._threads.train(lambda: self._ranks(method, *arguments, what=what))

    # Models

    async def add_model(self, model_id: str, lora: LoraSpec) -> None:
        """See the base class.

        Raises:
            RequestRefused: a rank above ``--lora-rank``, or nothing to train.
        """
        if model_id in self._models:
            raise RequestRefused(f"a model {model_id!r} is there already.")
        if not 1 <= lora.rank <= self.args.lora_rank:
            raise RequestRefused(
                f"lora_config.rank is {lora.rank}; this server has adapters of rank 1 to {self.args.lora_rank} "
                "(--lora-rank)."
            )
        if not (lora.train_attn or lora.train_mlp):
            raise RequestRefused(
                "lora_config has train_attn and train_mlp false; this server trains adapters of these alone, and none "
                "of the unembedding."
            )
        seed = secrets.randbits(31) if lora.seed is None else lora.seed % 2**31
        spec = replace(lora, seed=seed)
        await self._train("add", model_id, spec, what="a new adapter")
        self._models[model_id] = spec

    async def remove_model(self, model_id: str) -> None:
        """See the base class."""
        self._check_model(model_id)
        del self._models[model_id]
        await self._train("remove", model_id, what="the removal of an adapter")

    def _check_model(self, model_id: str) -> None:
        if model_id not in self._models:
            raise _unknown(model_id)

    # Training

    async def passes(self, requests: Sequence[PassRequest]) -> list[PassResult | Exception]:
        """See the base class; a request has been checked (``losses.check_pass``)."""
        results: list[Any] = [self._refusal(request) for request in requests]
        order = [index for index, refusal in enumerate(results) if refusal is None]
        if order:
            ranks = await self._train("run", [requests[index] for index in order], what="passes")
            for index, found in zip(order, zip(*ranks, strict=True), strict=True):
                results[index] = _joined(requests[index], found)
        return results

    def _refusal(self, request: PassRequest) -> RequestRefused | None:
        if request.model_id not in self._models:
            return _unknown(request.model_id)
        longest, limit = max(len(datum.tokens) for datum in request.data), self.args.max_tokens_per_gpu
        if longest <= limit:
            return None
        return RequestRefused(
            f"data has a datum of {longest} tokens; this server's trainer takes {limit} (--max-tokens-per-gpu)."
        )

    async def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        """See the base class."""
        self._check_model(model_id)
        metrics: dict[str, float] = (await self._train("step", model_id, adam, what="an optimizer step"))[0]
        return metrics

    async def drop_gradients(self, model_id: str) -> None:
        """See the base class."""
        self._check_model(model_id)
        await self._train("drop_gradient", model_id, what="the end of a gradient")

    async def save_state(self, model_id: str, folder: Path, with_optimizer: bool) -> None:
        """See the base class."""
        self._check_model(model_id)
        await self._train("save", model_id, folder.absolute(), with_optimizer, what="a save")

    async def load_state(self, model_id: str, folder: Path, with_optimizer: bool) -> None:
        """See the base class."""
        self._check_model(model_id)
        await self._train("load", model_id, folder.absolute(), with_optimizer, what="a load")

    # Samples

    async def publish_sampler(self, folder_or_model_id: Path | str, name: str) -> None:
        """See the base class."""
        if isinstance(folder_or_model_id, str):
            folder = self._snapshots / str(next(self._numbers))
            await self.save_state(folder_or_model_id, folder, with_optimizer=False)
            self._own_folders[name] = folder
        else:
            folder = folder_or_model_id.absolute()
        try:
            await self._threads.serve(lambda: self._engines.load(name, folder))
        except BaseException:
            self._drop_folder(name)
            raise

    async def drop_sampler(self, name: str) -> None:
        """See the base class."""
        await self._threads.serve(lambda: self._engines.unload(name))
        self._drop_folder(name)

    def _drop_folder(self, name: str) -> None:
        if (folder := self._own_folders.pop(name, None)) is not None:
            shutil.rmtree(folder, ignore_errors=True)

    async def sample(
        self,
        name: str | None,
        tokens: Sequence[int],
        params: SamplingParams,
        n: int = 1,
        prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> SampleResult:
        """See the base class; an engine that has started in the place of another gets the adapter first."""
        for attempt in range(LOAD_ATTEMPTS):
            self._threads.check()
            try:
                return await self._engines.sample(name, tokens, params, n, prompt_logprobs, topk_prompt_logprobs)
            except EngineError as error:
                if attempt == LOAD_ATTEMPTS - 1 or not lacks_adapter(error):
                    raise
            await self._threads.serve(lambda: self._engines.complete(doubted=name))
        raise AssertionError("the last attempt returns or raises")

    async def check(self) -> None:
        """See the base class."""
        self._threads.check()

    async def close(self) -> None:
        """See the base class."""
        await self._threads.close()
        shutil.rmtree(self._snapshots, ignore_errors=True)
        self._snapshots_lock.release()


def claim_snapshots(shared: Path) -> tuple[Path, SaveLock]:
    """Return a new folder in ``shared``, locked while this process lives; remove those of servers that have ended."""
    shared.mkdir(parents=True, exist_ok=True)
    for left in shared.glob(f"{SNAPSHOTS}*"):
        try:
            lock = SaveLock(left, "--training-api-dir")
        except ConfigError:  # its server lives
            continue
        shutil.rmtree(left, ignore_errors=True)
        lock.release()
    folder = Path(tempfile.mkdtemp(prefix=SNAPSHOTS, dir=shared))
    return folder, SaveLock(folder, "--training-api-dir")


def _unknown(model_id: str) -> RequestRefused:
    return RequestRefused(f"there is no model {model_id!r}; it was removed, or never made.")


def _joined(request: PassRequest, ranks: Sequence[dict[int, dict[str, np.ndarray]]]) -> PassResult:
    """Return the answer to a request of what each rank has of it."""
    found = {index: outputs for rank in ranks for index, outputs in rank.items()}
    outputs = [found[index] for index in range(len(request.data))]
    return PassResult(outputs, {"loss:sum": float(sum(one["elementwise_loss"].sum(dtype=float) for one in outputs))})


def start_backend(args: Namespace, parts: Parts) -> MegatronBackend:
    """Start trainer and engines of a service; Ray is connected (``slime.ray.job``)."""
    return MegatronBackend(args, parts)
