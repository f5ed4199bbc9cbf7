"""Plays tasks of verifiers 0.4 or later in an interpreter that has it; ``slime.ext.agent.tasksets`` starts it.

Standard input has questions, a JSON object a line with ``id`` and ``do``; standard output their answers, in any order.
The worker ends with its input.  It imports nothing of slime.
"""

import asyncio
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

Question = dict[str, Any]


def config_of(question: Question) -> Any:
    """Return the environment's config: names with dots are the environment's, others the taskset's."""
    from verifiers.v1.utils.loaders import resolve_env_config

    config: dict[str, Any] = {"taskset": {"id": question["name"]}}
    for key, value in question["arguments"].items():
        *folders, last = key.split(".") if "." in key else ("taskset", key)
        place = config
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = "null" if value is None and last == "id" else value  # the harness of that name, read as JSON
    if "max_turns" in question:
        config.setdefault("agent", {}).setdefault("max_turns", question["max_turns"])
    return resolve_env_config(config)


class Worker:
    """What was asked for before: tasks, and environments that serve."""

    def __init__(self) -> None:
        self.tasks: dict[str, list[Any]] = {}
        self.serving: dict[str, tuple[asyncio.Task[None], asyncio.Future[Any]]] = {}
        self.lock = asyncio.Lock()

    async def rows(self, question: Question) -> dict[str, Any]:
        """Return the first ``stop`` tasks, as far as a row of prompts shows them."""
        rows = []
        for task in await self.tasks_of(question):
            data = task.data
            asked = data.prompt if data.prompt is not None else data.description or data.name or ""
            messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
            messages = [m if isinstance(m, dict) else m.model_dump(mode="json", exclude_none=True) for m in messages]
            system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
            rows.append(system + messages)
        return {"rows": rows}

    async def tasks_of(self, question: Question) -> list[Any]:
        key = json.dumps([question["name"], question["arguments"]], sort_keys=True)
        async with self.lock:
            known = self.tasks.get(key, [])
            if "stop" in question or question["index"] >= len(known):
                # A play takes twice as many as before: tasks are loaded a few times, not once for each.
                stop = question["stop"] if "stop" in question else max(question["index"] + 1, 2 * len(known))
                self.tasks[key] = known = await asyncio.to_thread(self.load, question, stop)
        return known

    def load(self, question: Question, stop: int | None) -> list[Any]:
        from verifiers.v1.utils.loaders import load_taskset

        taskset = load_taskset(config_of(question).taskset)
        if stop is None and not taskset.bounded:
            raise ValueError(f"{question['name']} has tasks without end; take some of them by @[0:N]")
        return list(itertools.islice(taskset, stop))

    async def environment(self, question: Question) -> Any:
        key = json.dumps([question["name"], question["arguments"], question["max_turns"]], sort_keys=True)
        if key not in self.serving:
            ready = asyncio.get_running_loop().create_future()
            self.serving[key] = (asyncio.create_task(self.serve(question, ready)), ready)
            self.serving[key][0].add_done_callback(lambda _: self.serving.pop(key))  # the next play tries again
        return await asyncio.shield(self.serving[key][1])

    async def serve(self, question: Question, ready: asyncio.Future[Any]) -> None:
        """Hold what an environment's rollouts share, in one task."""
        from verifiers.v1.utils.loaders import load_environment

        try:
            environment = load_environment(config_of(question))
            harness, runtime = environment._harnesses["agent"], environment.config.agent.runtime
            if harness.EXECUTES_CODE and runtime.type == "subprocess" and not question["is_unsafe"]:
                raise ValueError(
                    f"the harness {harness.config.id!r} would run what the policy wrote on this machine; name another "
                    "(agent.harness.id), a runtime that isolates (agent.runtime.type), or give --unsafe-local-sandbox"
                )
            async with environment.serving():
                ready.set_result(environment)
                await asyncio.Event().wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)

    async def play(self, question: Question) -> dict[str, Any]:
        """Play one task; the model is at ``url``, and ``key`` opens it."""
        from verifiers.v1 import EvalClientConfig, ModelContext

        environment = await self.environment(question)
        task = (await self.tasks_of(question))[question["index"]]
        variable = f"SLIME_API_KEY_{question['key']}"  # programs of the environment do not inherit such names
        os.environ[variable] = question["key"]
        try:
            client = EvalClientConfig(base_url=question["url"], api_key_var=variable)
            (slot,) = environment.slots(task)
            episode = await environment.run_slot(slot, ModelContext(model="policy", client=client))
        finally:
            del os.environ[variable]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        trace = episode.traces[-1] if episode.traces else None
        return {
            "errors": [f"{error.type}: {error.message}" for error in errors],
            "reward": 0.0 if trace is None else trace.reward,
            "metrics": {} if trace is None else trace.metrics,
            "is_truncated": episode.is_timeout or (trace is not None and (trace.is_truncated or trace.is_timeout)),
        }

    async def answer(self, question: Question, say: Callable[[dict[str, Any]], None]) -> None:
        try:
            say({"id": question["id"], **await getattr(self, question["do"])(question)})
        except Exception as error:  # of the package or of an environment: the other side names it
            say({"id": question["id"], "failure": f"{type(error).__name__}: {error}"})


async def main(output: TextIO) -> None:
    """Answer until the input ends."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=1 << 26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    worker = Worker()
    running: dict[int, asyncio.Task[None]] = {}

    def say(answer: dict[str, Any]) -> None:
        output.write(json.dumps(answer, default=str) + "\n")
        output.flush()

    while line := await lines.readline():
        question = json.loads(line)
        if question["do"] == "cancel":
            if question["of"] in running:
                running[question["of"]].cancel()
            continue
        running[question["id"]] = task = asyncio.create_task(worker.answer(question, say))
        task.add_done_callback(functools.partial(lambda number, _: running.pop(number), question["id"]))
    ending = [*running.values(), *(task for task, _ in worker.serving.values())]
    for task in ending:
        task.cancel()
    if ending:
        await asyncio.wait(ending, timeout=10)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else prints goes to the log
    sys.path.insert(0, os.getcwd())
    asyncio.run(main(answers))
