"""The whole control plane of a job, without engines and trainer: prompts, rollouts, filters, training, checkpoints.

Everything between the data source and ``post`` is slime's code.  Time is virtual, requests and training are
scripted, and the job can be killed at any step of its event loop and between any two steps of a save: then only
files remain, with the ledger's last write cut off at an arbitrary byte.  In the order of ``train_async.py``, training
and each step of a save come at arbitrary steps of the next rollout.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.ext.ledger.ledger import TRACKER, Ledger
from slime.rollout import engine_client, fully_async_rollout, sglang_rollout
from slime.rollout.base_types import RolloutFnTrainOutput, first_index, leaf_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.run_state import CheckpointPosition, RunState, use_run
from slime.utils.misc import load_function
from slime.utils.types import Sample
from tests.scripted_engine.script import Request, Script, split_prompt, text_of
from tests.unit.rollout.fake_cluster import clear_process, make_args, write_prompts

HERE = __name__


class Killed(BaseException):
    """The process was killed."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer; ``on_step`` is called at each of its steps."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        super().__init__()
        self._now = 0.0
        self._on_step = on_step

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        self._on_step()
        if not self._ready and self._scheduled:
            while self._scheduled and self._scheduled[0]._cancelled:
                heapq.heappop(self._scheduled)._scheduled = False
            if self._scheduled:
                self._now = max(self._now, self._scheduled[0]._when)
        super()._run_once()


@dataclass
class World:
    """What survives a kill: the files, and the test's own records."""

    folder: Path
    flags: dict[str, Any]
    num_groups: int
    """The job ends when each of the first ``num_groups`` groups is trained or dropped by the filter."""
    script: Script
    seconds: Callable[[Request], float]
    """Seconds that the engine needs per token."""
    save_interval: int = 1
    is_ahead: bool = False
    """The order of ``train_async.py``: the next rollout runs while one is trained and saved."""
    kills: list[int] = field(default_factory=list)
    """Steps, counted from the start of each life, after which the process is killed."""
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    returned: Counter[tuple[tuple[int, ...], int, int]] = field(default_factory=Counter)
    """(prompt, seed, response tokens so far) of each answer that reached the ledger's file -> how often."""
    asked_again: list[Any] = field(default_factory=list)
    trained: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """Rollout -> samples of its train data, in the surviving lineage."""
    num_steps: int = 0
    num_requests: int = 0
    num_lives: int = 0
    dull: int | None = 3
    """The filter drops groups whose number modulo 5 is this."""
    final_state: dict[str, Any] = field(default_factory=dict)

    @property
    def is_drained(self) -> bool:
        """Whether the first groups are all done."""
        trained = {sample["group"] for samples in self.trained.values() for sample in samples}
        return all(name in trained or name % 5 == self.dull for name in range(self.num_groups))

    def samples_of_first_groups(self, *, but: str = "") -> Counter[Any]:
        """Their trained samples, as a multiset.

        Args:
            but: a column to ignore.
        """
        samples = [sample for rollout in self.trained.values() for sample in rollout]
        return Counter(
            tuple(item for item in sample.items() if item[0] != but)
            for sample in samples
            if sample["group"] < self.num_groups
        )


class Life:
    """One process: it starts from the files and runs until it is done or killed."""

    def __init__(self, world: World, monkeypatch: Any) -> None:
        self.world = world
        self.steps = 0
        self.kill_at = world.kills[world.num_lives] if world.num_lives < len(world.kills) else None
        world.num_lives += 1
        self.loop = VirtualLoop(self.step)
        self.in_flight: list[Request] = []
        clear_process(monkeypatch)
        monkeypatch.setattr(engine_client, "post", self.post)
        monkeypatch.setattr(engine_client, "control_post", self.abort_all)
        monkeypatch.setattr(engine_client, "control_get", self.control_get)
        for module in (sglang_rollout, fully_async_rollout):
            monkeypatch.setattr(module, "run", lambda work, timeout: self.loop.run_until_complete(work))
        monkeypatch.setattr(fully_async_rollout, "get_async_loop", lambda: self.loop)
        fully_async_rollout._WORKERS.clear()
        self.args = self.make_args()
        self.weight_version = 1 + self.args.start_rollout_id
        self.rollout_function = load_function(self.args.rollout_function_path)
        self.chores: Iterator[None] = iter(())
        """The remaining work of training and saving the previous rollout."""
        self.source: Any = None
        self.ledger: Any = None
        self.position: Any = None

    def make_args(self) -> Namespace:
        world = self.world
        latest = tracker(world.folder)
        return make_args(
            30000,
            **{
                "prompt_data": str(world.folder / "prompts.jsonl"),
                "save": str(world.folder / "save"),
                "load": str(world.folder / "save"),
                "start_rollout_id": latest + 1,
                "partial_rollout": True,
                "custom_rm_path": f"{HERE}.reward",
                "rollout_max_response_len": 64,
                "sglang_enable_deterministic_inference": True,
                "rollout_function_path": f"{sglang_rollout.__name__}.generate_rollout",
                **world.flags,
            },
        )

    def step(self) -> None:
        self.steps += 1
        if self.kill_at is not None and self.steps >= self.kill_at:
            raise Killed

    # The engine

    async def post(self, url: str, payload: dict[str, Any], *rest: Any, **keywords: Any) -> dict[str, Any]:
        world = self.world
        prompt, earlier = split_prompt(payload["input_ids"])
        params = payload["sampling_params"]
        seed = params.get("sampling_seed", 0)
        if (prompt, seed, earlier) in world.returned:
            world.asked_again.append(("".join(map(chr, prompt)), seed, earlier))
        world.num_requests += 1
        request = Request(0, payload, prompt, earlier, seed, params["max_new_tokens"], "")
        total = world.script.length_of(request)
        num_new = min(total - earlier, request.limit)
        each_s = world.seconds(request)
        self.in_flight.append(request)
        start = self.loop.time()
        aborted = asyncio.ensure_future(request.aborted.wait())
        try:
            await asyncio.wait([aborted], timeout=num_new * each_s)
        finally:
            aborted.cancel()
            self.in_flight.remove(request)
        kind = "stop" if earlier + num_new == total else "length"
        if request.aborted.is_set():
            num_drawn = int((self.loop.time() - start) / each_s)
            num_new, kind = (num_drawn, "abort") if num_drawn < num_new else (num_new, kind)
        tokens = world.script.tokens_of(request, earlier, earlier + num_new)
        return {
            "text": text_of(tokens),
            "meta_info": {
                "finish_reason": {"type": kind},
                "output_token_logprobs": [
                    [p, t, None] for p, t in zip(world.script.log_probs_of(tokens, earlier), tokens, strict=True)
                ],
                "weight_version": str(self.weight_version),
                "prompt_tokens": len(payload["input_ids"]),
                "completion_tokens": num_new,
                "cached_tokens": 0,
            },
        }

    async def abort_all(self, url: str, payload: Any, *rest: Any, **keywords: Any) -> None:
        await asyncio.sleep(0)
        for request in self.in_flight:
            request.aborted.set()

    async def control_get(self, url: str, *rest: Any, **keywords: Any) -> Any:
        await asyncio.sleep(0)
        if url.endswith("/model_info"):
            return {"weight_version": str(self.weight_version)}
        return {"workers": [{"url": "engine"}]} if url.endswith("/workers") else {"loads": []}

    # The job

    def run(self) -> bool:
        """Return True if the job finished, False if it was killed."""
        asyncio.set_event_loop(self.loop)
        try:
            self.job()
            return True
        except Killed:
            self.die()
            return False
        finally:
            use_run(RunState())
            self.world.num_steps = self.steps
            self.bury()

    def bury(self) -> None:
        """End what the kill left of the event loop, so that it cannot disturb the next life."""

        async def end_all() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self.loop._on_step = lambda: None
        for _ in range(3):
            last = end_all()
            try:
                self.loop.run_until_complete(last)
                break
            except RuntimeError:  # the killed rollout's task ended, and stopped the loop once more
                last.close()
        self.loop.close()

    def job(self) -> None:
        """The order of the training loops and of ``RolloutManager``."""
        args, world = self.args, self.world
        source = self.source = RolloutDataSourceWithBuffer(args)
        self.ledger = Ledger(args, source, is_threaded=False)
        self.run_state = use_run(RunState((self.ledger,)))
        self.watch_writes()
        source.load(args.start_rollout_id - 1)
        self.ledger.start(args.start_rollout_id)
        self.step()
        for gone in [k for k in world.trained if k >= args.start_rollout_id]:
            del world.trained[gone]
        self.position = CheckpointPosition(source, [self.ledger])
        rollout_id = args.start_rollout_id
        while not world.is_drained:
            world.trained[rollout_id] = self.generate(rollout_id)
            self.do_chores()  # the remaining work of the previous rollout
            self.chores = self.train_and_save(rollout_id)
            if not world.is_ahead:
                self.do_chores()
            rollout_id += 1
        self.do_chores()
        self.ledger.close()
        world.final_state = source.state_dict()

    def generate(self, rollout_id: int) -> list[dict[str, Any]]:
        self.run_state.begin(rollout_id)
        self.do_some_chores()
        self.position.begin(rollout_id)
        self.do_some_chores()
        output = self.ledger.make_samples(
            rollout_id, lambda: self.rollout_function(self.args, rollout_id, self.source)
        )
        assert isinstance(output, RolloutFnTrainOutput)
        return [frozen_sample(sample) for sample in leaf_samples(output.samples)]

    def train_and_save(self, rollout_id: int) -> Iterator[None]:
        """The trainer's work on a rollout, in steps."""
        self.ledger.trained(rollout_id)
        yield
        if (rollout_id + 1) % self.world.save_interval == 0 or self.world.is_drained:
            yield  # the model and the optimizer are written
            self.position.save(rollout_id)
            yield
            path = self.world.folder / "save" / TRACKER
            path.write_text(str(rollout_id))
            yield
            self.ledger.published(rollout_id)
            yield

    def do_chores(self) -> None:
        """Do all remaining work; background generation continues meanwhile."""
        self.step()
        for _ in self.chores:
            self.step()
            self.loop.run_until_complete(asyncio.sleep(0.02))
        if self.rollout_function is not sglang_rollout.generate_rollout:
            self.push()

    def do_some_chores(self) -> None:
        while self.world.rng.random() < 0.3 and next(self.chores, self) is None:
            self.step()

    def push(self) -> None:
        """New weights: requests in flight are interrupted."""
        self.weight_version += 1
        for request in self.in_flight:
            request.aborted.set()

    # The ledger's files

    def watch_writes(self) -> None:
        """Record which answers reached the file; sometimes write pending ones, as the writer's thread would."""
        writer = self.ledger.journal.writer
        write, on_step = writer._write, self.step
        encode = writer._encode
        held: list[Any] = []

        def noting_encode(item: Any) -> bytes:
            if item.kind.name == "RESPONSE":
                held.append(item)
            return encode(item)

        def noting_write(data: bytes) -> None:
            write(data)
            for item in held:
                self.note_returned(item)
            held.clear()

        def busy_step() -> None:
            on_step()
            if self.world.rng.random() < 0.3:
                writer.flush()
            if self.world.rng.random() < 0.05:
                next(self.chores, None)

        writer._encode, writer._write = noting_encode, noting_write
        self.loop._on_step = busy_step

    def note_returned(self, item: Any) -> None:
        leaves = item.entries[0][1]
        leaf = leaves.samples[0].values
        if leaves.shape != 0 and leaf["status"] == "aborted":
            return  # an interrupted fan-out restarts, whether or not anything was killed
        issued = item.entries[0][2]
        tokens = getattr(leaf["tokens"], "value", leaf["tokens"])
        prompt, _ = split_prompt(tokens)
        earlier = issued["response_length"]
        if leaf["response_length"] > earlier:
            seed = self.args.rollout_seed + leaf["index"] % self.args.n_samples_per_prompt
            self.world.returned[(prompt, seed, earlier)] += 1

    def die(self) -> None:
        """Write some bytes of the pending data; the rest is lost."""
        if self.ledger is None:
            return
        writer = self.ledger.journal.writer
        frames = b"".join(writer._encode(item) for item in list(writer._waiting))
        cut = self.world.rng.randint(0, len(frames)) if frames else 0
        path = sorted((Path(self.args.save) / "ledger").glob("segment-*.led"))[-1]
        with open(path, "ab") as file:
            file.write(frames[:cut])


def run_to_the_end(world: World, monkeypatch: Any) -> None:
    """Restart the same command until it finishes."""
    while not Life(world, monkeypatch).run():
        assert world.num_lives < len(world.kills) + 2


def tracker(folder: Path) -> int:
    """The rollout of the valid checkpoint; -1 without one."""
    path = folder / "save" / TRACKER
    return int(path.read_text()) if path.exists() else -1


def frozen_sample(sample: Sample) -> dict[str, Any]:
    """What training sees of a sample."""
    return {
        "group": sample.group_index,
        "index": sample.index,
        "prompt": sample.prompt,
        "tokens": tuple(sample.tokens),
        "response": sample.response,
        "status": sample.status.value,
        "reward": sample.reward,
        "masked": len(sample.loss_mask or ()) - sum(sample.loss_mask or ()),
        "log_probs": tuple(round(p, 4) for p in sample.rollout_log_probs or ()),
    }


def make_world(folder: Path, *, num_groups: int, num_prompts: int = 200, seed: int = 0, **options: Any) -> World:
    """A job over ``num_prompts`` prompts, which must train ``num_groups`` of them."""
    folder.mkdir(parents=True, exist_ok=True)
    write_prompts(folder / "prompts.jsonl", [f"prompt {k}" for k in range(num_prompts)])
    (folder / "save").mkdir(exist_ok=True)
    flags = {
        "rollout_batch_size": 4,
        "over_sampling_batch_size": 6,
        "n_samples_per_prompt": 2,
        "dynamic_sampling_filter_path": f"{HERE}.drops_some",
        **options.pop("flags", {}),
    }
    values = {
        "script": Script(length=(2, 12)),
        "seconds": lambda request: 0.01 + 0.003 * (request.prompt[-1] % 7),
        "rng": random.Random(seed),
        **options,
    }
    return World(folder, flags, num_groups, **values)


# Plug-ins


async def reward(args: Namespace, sample: Any, **keywords: Any) -> Any:
    """A number that depends only on the response; takes some time.  Accepts a sample or a list."""
    await asyncio.sleep(0.02)
    if isinstance(sample, list):
        return [await reward(args, one) for one in sample]
    return float(sum(sample.tokens) % 5)


def drops_some(args: Namespace, group: list[Sample], **keywords: Any) -> bool:
    """Drops every fifth group."""
    return not is_dull(first_index(group) // args.n_samples_per_prompt)


def is_dull(name: int) -> bool:
    """Whether the filter drops the group of this number."""
    return name % 5 == 3


async def attaches_a_lock(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """A generate function that attaches an unpicklable object to the sample."""
    import threading

    from slime.rollout.sglang_rollout import generate

    sample.client = threading.Lock()
    return await generate(args, sample, sampling_params)


def counts_visits(args: Namespace, sample: Sample) -> None:
    """A sample hook that modifies the response, and must run exactly once."""
    if sample.status is not Sample.Status.ABORTED:
        sample.response += "+"
