"""The servers of the simulated network: SGLang's engines and router, as seen by the control plane."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from safetensors import SafetensorError, safe_open

from slime.ext.fast_push.messages import PUSH_REPORT
from tests.scripted_engine.script import Request, Script, split_prompt, text_of
from tests.simulator.kernel import Process
from tests.simulator.network import Cut, Reply, Server, send
from tests.simulator.weight_groups import Member, state_in

LOG_PROB_UNIT = 1e-3
"""The log-prob of a token encodes the weights that generated it: minus (their number + 1) units."""

NO_ENGINES = b'{"error": {"code": "no_available_workers", "message": "No available workers"}}'
HANG_UP_S = 4.0
"""Seconds between SGLang's checks for a client (SGLANG_REQUEST_STATE_WAIT_TIMEOUT), which end abandoned requests."""


@dataclass
class _Running:
    """A request for which an engine generates tokens."""

    request: Request
    reply: Reply
    begin_s: float
    seconds: float
    num_new: int
    kind: str
    is_over: bool = False


@dataclass
class _Held:
    """The weights that an engine holds, bucket by bucket: numbers of states, None for a hole."""

    buckets: list[int | None]
    push_id: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def state(self) -> int | None:
        return self.buckets[0] if len(set(self.buckets)) == 1 else None


@functools.cache
def name_of_handler(path: str) -> str:
    """Return the name of the method that answers requests to a path."""
    return "do_" + path.partition("?")[0].strip("/").replace("/", "_")


class EngineServer(Server):
    """An SGLang server with slime's weight loader in it."""

    kind = "engine"

    def __init__(self, world: Any, process: Process, settings: Mapping[str, Any], *, ready_s: float) -> None:
        super().__init__(world, process, settings["port"], ready_s=ready_s)
        self.script: Script = world.script
        self.gpu: int = settings["rank"]
        self.is_trained: bool = settings["is_trained"]
        self.prefills: bool = settings["worker_type"] == "prefill"
        self.held = _Held([world.disk_state] * world.num_buckets)
        self.version = "default"
        self.is_paused = False
        self.is_pushed_to = False
        """A push has begun and is not committed."""
        self.released: set[str] = set()
        self.running: list[_Running] = []
        self.queue: list[tuple[Any, Reply]] = []
        """Requests that came while it was paused."""
        self.messages: list[tuple[Any, float, Reply]] = []
        """Ids of pushes, the first one running."""
        self.message_problems: list[str] = []
        """Of the last message, where it belongs to no push."""
        self.member = Member(self)
        world.engine_started(self)

    def handle(self, method: str, path: str, payload: Any, reply: Reply) -> None:
        handler = getattr(self, name_of_handler(path), None)
        if handler is None:
            reply(404, b"not found")
        else:
            handler(payload, reply)

    def _ok(self, reply: Reply, value: Any = None) -> None:
        reply(200, b"" if value is None else orjson.dumps(value))

    def do_health_generate(self, payload: Any, reply: Reply) -> None:
        if self.is_paused:  # it waits for a token
            self.later(20.0, lambda: reply(503, b""))
        else:
            self.later(0.01, lambda: self._ok(reply))

    def do_model_info(self, payload: Any, reply: Reply) -> None:
        self._ok(reply, {"weight_version": self.version})

    def do_v1_loads(self, payload: Any, reply: Reply) -> None:
        entry = {"num_running_reqs": len(self.running), "num_waiting_reqs": len(self.queue)}
        self._ok(reply, {"loads": [entry]})

    def do_generate(self, payload: Any, reply: Reply) -> None:
        if self.is_paused:
            self.queue.append((payload, reply))
            return
        if self.is_pushed_to:
            self.world.violate(f"{self.process} serves a request in the middle of a push")
        if self.released:
            self.world.violate(f"{self.process} serves a request while its memory is given away")
        prompt, earlier = split_prompt(payload["input_ids"])
        params = payload["sampling_params"]
        request = Request(0, payload, prompt, earlier, params.get("sampling_seed", 0), params["max_new_tokens"], "")
        if self.is_trained:
            self.world.asked(self, request)
        total = self.script.length_of(request)
        num_new = 1 if self.prefills else max(1, min(total - earlier, request.limit))
        kind = "stop" if earlier + num_new == total else "length"
        seconds = num_new * self.world.seconds_per_token
        running = _Running(request, reply, self.kernel.now_s, seconds, num_new, kind)
        self.running.append(running)
        self.later(seconds, lambda: self._end(running))
        reply.on_hang_up = lambda: self.later(
            self.kernel.draw("see a hang-up", 0.0, HANG_UP_S), lambda: self._drop(running)
        )

    @property
    def num_awaited(self) -> int:
        return sum(reply.is_awaited for reply in [*(r.reply for r in self.running), *(r for _, r in self.queue)])

    def _drop(self, running: _Running) -> None:
        if not running.is_over:
            running.is_over = True
            self.running.remove(running)

    def _end(self, running: _Running, *, is_aborted: bool = False) -> None:
        if running.is_over:
            return
        running.is_over = True
        self.running.remove(running)
        request, num_new, kind = running.request, running.num_new, running.kind
        if is_aborted:
            passed = (self.kernel.now_s - running.begin_s) / running.seconds
            if passed < 1:
                num_new, kind = int(passed * num_new), "abort"
        tokens = self.script.tokens_of(request, request.earlier, request.earlier + num_new)
        state = self.held.state
        if state is None:
            self.world.violate(f"{self.process} draws tokens with weights of two versions")
        if num_new and len(request.prompt) > 1 and self.is_trained:
            self.world.tokens_drawn(self, state, self.version, request, num_new)
        log_prob = -LOG_PROB_UNIT * ((state or 0) + 1)
        self._ok(
            running.reply,
            {
                "text": text_of(tokens),
                "meta_info": {
                    "finish_reason": {"type": kind},
                    "output_token_logprobs": [[log_prob, token, None] for token in tokens],
                    "weight_version": self.version,
                    "prompt_tokens": len(request.payload["input_ids"]),
                    "completion_tokens": num_new,
                    "cached_tokens": 0,
                },
            },
        )

    def _abort(self) -> None:
        for running in list(self.running):
            self._end(running, is_aborted=True)

    def do_abort_request(self, payload: Any, reply: Reply) -> None:
        self._abort()
        waiting, self.queue = self.queue, []
        for request in waiting:
            was_paused, self.is_paused = self.is_paused, False
            self.do_generate(*request)
            self.is_paused = was_paused
        self._abort()
        self._ok(reply)

    def do_pause_generation(self, payload: Any, reply: Reply) -> None:
        self.is_paused = True
        self._abort()
        self._ok(reply)

    def do_continue_generation(self, payload: Any, reply: Reply) -> None:
        self.is_paused = False
        waiting, self.queue = self.queue, []
        for request in waiting:
            self.do_generate(*request)
        self._ok(reply)

    def do_flush_cache(self, payload: Any, reply: Reply) -> None:
        if self.running:
            reply(400, b"requests are running")
        else:
            self._ok(reply)

    def do_release_memory_occupation(self, payload: Any, reply: Reply) -> None:
        if self.running:
            self.world.note(f"{self.process} was told to release its memory while it generates, and ends itself")
            self.process.kill()
            return
        self.released.update(payload["tags"])
        self._ok(reply)

    def do_resume_memory_occupation(self, payload: Any, reply: Reply) -> None:
        self.released.difference_update(payload["tags"])
        self._ok(reply)

    # Weights

    def do_update_weights_from_tensor(self, payload: Any, reply: Reply) -> None:
        message = payload["serialized_named_tensors"][0]
        seconds = self.world.bucket_seconds if message["verb"].startswith("receive") else 0.001
        self.messages.append((message, seconds, reply))
        if len(self.messages) == 1:
            self._next_message()

    def _next_message(self) -> None:
        """Have the loader take the oldest request; it takes no other before that is done."""
        message, seconds, reply = self.messages[0]

        def done() -> None:
            self._ok(reply, {"success": True})
            self.messages.pop(0)
            if self.messages:
                self._next_message()

        def told(problem: str) -> None:
            self.message_problems = [f"{message['verb']}: {problem}"] if problem else []
            done()

        def received(problem: str, state: int | None) -> None:
            if problem:
                self.held.problems.append(problem)
            self._load(message | {"state": state})
            done()

        def take() -> None:
            self.message_problems = []
            if message["verb"] == "join_weight_group":
                self.member.join(message, told)
            elif "group_name" in message and message["verb"] == "receive_weight_bucket" and message["group_name"]:
                self.member.receive(message, received)
            else:
                self._load(message)
                done()

        self.later(seconds, take)

    def _load(self, message: Mapping[str, Any]) -> None:
        verb, held = message["verb"], self.held
        if verb == "begin_weight_update":
            self.held = _Held([None] * self.world.num_buckets, message["push_id"])
            self.is_pushed_to = True
        elif verb == "leave_weight_group":
            self.member.leave(message)
        elif verb in ("receive_weight_bucket", "receive_weight_folder"):
            if self.running:
                self.world.violate(f"{self.process} loads weights while it generates")
            if not self.is_paused:
                self.world.violate(f"{self.process} loads weights and was not paused")
            index = message["bucket_index"]
            sent = self._arrived(message, index)
            if message["push_id"] != held.push_id:
                held.problems.append(f"a bucket of {message['push_id']}")
            elif sent is not None:
                held.buckets[index] = sent

    def _arrived(self, message: Mapping[str, Any], index: int) -> int | None:
        """Return the state of a bucket: in a message, received by broadcast, or from the named folder."""
        if "state" in message:
            return message["state"]  # type: ignore[no-any-return]
        if "folder" not in message:
            return self.world.wire.get((message["push_id"], index))
        folder, name = Path(message["folder"]), f"t{index}"
        try:
            file = json.loads((folder / "model.safetensors.index.json").read_bytes())["weight_map"][name]
            with safe_open(folder / file, "pt") as tensors:
                return state_in(tensors.get_tensor(name))
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            self.held.problems.append(f"{folder}: {type(error).__name__}: {error}")
            return None

    def do_get_weights_by_name(self, payload: Any, reply: Reply) -> None:
        assert payload["name"] == PUSH_REPORT, payload
        held = self.held
        digests = [
            "" if state is None else f"{self.world.digest(state, k):016x}" for k, state in enumerate(held.buckets)
        ]
        report = {
            "push_id": held.push_id, "needs_manifest": False, "buckets": digests,
            "problems": [*self.message_problems, *held.problems],
            "is_unpacked": False,
            "seconds": {},
        }  # fmt: skip
        self._ok(reply, [orjson.dumps(report).decode()])

    def do_update_weight_version(self, payload: Any, reply: Reply) -> None:
        self.version = payload["new_version"]
        self.is_pushed_to = False
        self.world.version_committed(self, self.version, self.held.state)
        self._ok(reply)


class RouterServer(Server):
    """sglang_router: a list of engines, and requests passed on to one of them."""

    kind = "router"
    retries = 2

    def __init__(self, world: Any, process: Process, port: int, *, ready_s: float) -> None:
        super().__init__(world, process, port, ready_s=ready_s)
        self.workers: dict[str, tuple[str, str]] = {}
        """Id -> URL and role."""
        self._turn = 0

    def handle(self, method: str, path: str, payload: Any, reply: Reply) -> None:
        if path == "/health":
            reply(200, b"ok")
        elif path == "/workers" and method == "GET":
            listed = [{"id": name, "url": url, "worker_type": kind} for name, (url, kind) in self.workers.items()]
            reply(200, orjson.dumps({"workers": listed}))
        elif path == "/workers":
            self._turn += 1
            name, url = f"w{self._turn}", payload["url"]
            delay_s = self.kernel.draw("router lists", 0.001, 1.0)

            def listed() -> None:
                if url not in self._urls():
                    self.workers[name] = url, payload["worker_type"]

            self.later(delay_s, listed)
            reply(202, b"{}")
        elif path.startswith("/workers/"):
            name = path.rpartition("/")[2]
            if name not in self.workers:
                reply(404, b"no such worker")
                return
            self.later(self.kernel.draw("router removes", 0.001, 1.0), lambda: self.workers.pop(name, None))
            reply(202, b"{}")
        elif path == "/generate":
            self._pass_on(payload, reply, self.retries)
        else:
            reply(404, b"not found")

    def _urls(self, *kinds: str) -> list[str]:
        return [url for url, kind in self.workers.values() if kind in kinds or not kinds]

    def _pass_on(self, payload: Any, reply: Reply, retries: int) -> None:
        """Have one engine answer a request; with prefill engines, first one of them and then a decode engine."""
        stages = [urls for kind in ("prefill", "decode") if (urls := self._urls(kind))]
        if not self._urls("regular") and len(stages) < 2:
            self.later(0.5, lambda: reply(503, NO_ENGINES))
            return
        self._turn += 1
        left = [urls[self._turn % len(urls)] for urls in stages or [self._urls("regular")]]

        def done(outcome: Any) -> None:
            if not self.process.is_alive:
                return
            if isinstance(outcome, Cut):
                if retries:
                    self.later(0.1, lambda: reply.was_hung_up or self._pass_on(payload, reply, retries - 1))
                else:
                    reply(502, str(outcome).encode())
            elif left and outcome[0] == 200:
                ask(left.pop(0))
            else:
                reply(*outcome)

        def ask(url: str) -> None:
            # Like sglang-router 0.3.2: its connection to an engine ends with its client's, and with its process.
            reply.on_hang_up = send(self.world, "POST", f"{url}/generate", payload, done, sender=self.process)

        ask(left.pop(0))
