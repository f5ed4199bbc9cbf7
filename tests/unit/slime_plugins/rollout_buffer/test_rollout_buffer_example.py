"""Generator, service and rollout function together, over HTTP, with an engine that answers chat completions."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
import uvicorn
from aiohttp import web

from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.utils.aiohttp_threaded import run_app_in_thread
from slime.utils.errors import DeadlineError
from slime.utils.net import get_free_port
from slime.utils.types import Sample
from slime_plugins.rollout_buffer import rollout_buffer_example
from slime_plugins.rollout_buffer.buffer import create_app
from slime_plugins.rollout_buffer.generator.base_generator import Worker, read_instances
from tests.flag_values import args_with
from tests.unit.talking_engine import make_tokenizer


class ChatEngine:
    """Answers "the sum is in the box" in two pieces, because each answer is aborted once."""

    def __init__(self):
        self.bodies = []
        self.num_drawn, self.first = 24, "<think>hm</think> It is "
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        self.server = run_app_in_thread(app, host="127.0.0.1")

    async def answer(self, request):
        body = await request.json()
        self.bodies.append(body)
        goes_on = body.get("continue_final_message", False)
        a, b = body["messages"][0]["content"].split("+")
        text = f"\\boxed{{{int(a) + int(b)}}}" if goes_on else self.first
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop" if goes_on else "abort"}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": self.num_drawn}})


@pytest.fixture
def engine():
    made = ChatEngine()
    yield made
    made.server.stop()


@pytest.fixture
def service(tmp_path):
    port = get_free_port()
    app = create_app(data_folders=[tmp_path])
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(20)


@pytest.fixture
def args(tmp_path, monkeypatch):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"{k}+1", "label": str(k + 1 if k != 2 else 99)} for k in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(rollout_buffer_example, "_STARTED", set())
    monkeypatch.setattr(rollout_buffer_example, "POLL_S", 0.2)
    return args_with(
        rollout_timeout_s=300.0,
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        rollout_max_response_len=64,
        num_epoch=1,
        prompt_data=str(tmp_path / "rows.jsonl"),
        hf_checkpoint=str(tmp_path / "model"),
        rollout_buffer_num_process=1,
        rollout_global_dataset=False,
    )


def test_three_prompts_are_played_graded_grouped_and_trained(args, engine, service):
    args.rollout_buffer_url = service
    args.sglang_router_ip, args.sglang_router_port = "127.0.0.1", engine.server.port
    source = RolloutDataSourceWithBuffer(args)
    output = rollout_buffer_example.generate_rollout(args, 0, source)
    groups = [*output.samples, *source.buffer]
    assert len(output.samples) == 2
    names = {group[0].metadata["instance_id"] for group in groups}
    assert len(groups) in (2, 3) and names <= {"0", "1", "2"}
    for group in groups:
        assert {sample.metadata["instance_id"] for sample in group} == {group[0].metadata["instance_id"]}
        for sample in group:
            assert sample.reward == (0.0 if sample.metadata["instance_id"] == "2" else 1.0)
            assert sample.status is Sample.Status.COMPLETED
            assert len(sample.loss_mask) == sample.response_length <= len(sample.tokens)
    assert sorted(s.index for group in groups for s in group) == list(range(2 * len(groups)))
    assert set(source.get_metadata()[rollout_buffer_example.SEEN_KEY]) == names
    assert output.metrics["rollout_buffer/avg_group_size"] > 0
    resumed = [body for body in engine.bodies if body.get("continue_final_message")]
    assert resumed and resumed[0]["messages"][-1] == {"role": "assistant", "content": "<think>hm</think> It is "}
    assert {body["max_tokens"] for body in resumed} == {40}


def test_an_answer_that_was_cut_within_a_character_goes_on_before_it_with_the_arguments_of_the_template(engine):
    engine.first = "It is \ufffd"
    data = {"remote_engine_url": f"http://127.0.0.1:{engine.server.port}", "remote_buffer_url": ""}
    player = Worker(data | {"chat_template_kwargs": {"enable_thinking": False}}, concurrency=1)
    text, _ = asyncio.run(player.answer([{"role": "user", "content": "1+1"}]))
    assert text == "It is \\boxed{2}"
    assert engine.bodies[1]["messages"][-1]["content"] == "It is "
    assert [body["chat_template_kwargs"] for body in engine.bodies] == [{"enable_thinking": False}] * 2


def test_groups_are_counted_and_not_their_items(args, monkeypatch):
    """A generator may post more or fewer items of an instance than are trained."""
    reads = [["a"] * 5 + ["short"], ["b", "b"]]

    async def post(url, payload, **options):
        if url.endswith("/start_rollout"):
            assert payload["chat_template_kwargs"] == {"enable_thinking": False}
            return {}
        messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
        items = [{"instance_id": name, "messages": messages, "reward": 1.0} for name in reads.pop(0)]
        return {"success": True, "data": {"data": items, "meta_info": {}}}

    monkeypatch.setattr(rollout_buffer_example, "post", post)
    args.apply_chat_template_kwargs = {"enable_thinking": False}
    args.rollout_buffer_url = "http://127.0.0.1:9"
    args.sglang_router_ip, args.sglang_router_port = "127.0.0.1", 9
    groups = rollout_buffer_example.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples
    assert sorted(group[0].metadata.get("instance_id") for group in groups) == ["a", "b"]
    assert [len(group) for group in groups] == [2, 2]


def test_a_service_without_data_ends_the_rollout_after_the_retries(args, engine, service):
    args.rollout_buffer_url, args.fetch_trajectory_retry_times = service, 2
    args.sglang_router_ip, args.sglang_router_port = "127.0.0.1", engine.server.port
    open(args.prompt_data, "w").close()
    with pytest.raises(DeadlineError, match="3 times in a row; 0 of 4 items"):
        rollout_buffer_example.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))


def test_a_service_without_data_ends_the_rollout_at_its_deadline(args, engine, service):
    args.rollout_buffer_url, args.fetch_trajectory_retry_times = service, -1
    args.sglang_router_ip, args.sglang_router_port = "127.0.0.1", engine.server.port
    args.rollout_timeout_s = 0.2
    open(args.prompt_data, "w").close()
    with pytest.raises(DeadlineError, match="did not fill within 0 s; 0 of 4 items"):
        rollout_buffer_example.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))


def test_instances_repeat_carry_their_epoch_and_can_be_skipped(args):
    data = {"input_file": args.prompt_data, "num_epoch": "2", "num_repeat_per_sample": "2"}
    names = [instance["instance_id"] for instance in read_instances({**data, "skip_instance_ids": ["0", "2#1"]})]
    assert names == ["1", "1", "2", "2", "0#1", "0#1", "1#1", "1#1"]
