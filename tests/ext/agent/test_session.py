"""An agent's session gives the same sample as the job's own conversation, including images and replays."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch
from PIL import Image

from examples.vision_shapes import model
from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from slime.ext.agent import session
from slime.rollout.engine_client import WorkerPicker
from slime.rollout.multi_turn import converse
from slime.rollout.sglang_rollout import GenerateState
from slime.train_data.convert import samples_to_train_data
from slime.train_data.routed_experts import RoutedShape
from slime.utils.processing_utils import encode_image_for_rollout_engine, load_tokenizer, open_image
from slime.utils.types import Sample

LAYERS, TOP_K, EXPERTS = 2, 2, 30_000
PROMPT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>x?<|im_end|>\n<|im_start|>assistant\n"
PARAMS = {"temperature": 1.0, "max_new_tokens": 500, "custom_params": {"return_top_p_token_ids": True}}
RED, BLUE = Image.new("RGB", (32, 48), "red"), Image.new("RGB", (64, 32), "blue")


def int32(values) -> str:
    return base64.b64encode(np.asarray(values, dtype="<i4").tobytes()).decode()


@pytest.fixture
def job(talk):
    """``job()`` returns args of a vision model, and the payloads of its engine, which reports experts and nuclei."""

    def start(**attributes):
        args, engine = talk(
            lambda prompt: ["look", "done"][prompt.count("assistant") - 1],
            **{"use_rollout_routing_replay": True, "num_layers": LAYERS, "moe_router_topk": TOP_K, **attributes},
        )
        model.write_processor(Path(args.hf_checkpoint))
        engine.script.tokenizer = load_tokenizer(args.hf_checkpoint)
        for kind in (GenerateState, WorkerPicker):
            kind.clear_instances()
        plain, payloads = engine.render, []

        def render(request, *values):
            answer, payload = json.loads(plain(request, *values)), request.payload
            payloads.append(payload)
            meta, drawn = answer["meta_info"], answer["output_ids"]
            for image in map(open_image, payload.get("image_data") or ()):
                meta["prompt_tokens"] += image.width * image.height // 16**2 - 1
            if payload.get("return_routed_experts"):
                # Experts differ at each position in each call, so that rows of another call would be noticed.
                size = (meta["prompt_tokens"] + len(drawn) - 1) * LAYERS * TOP_K
                meta["routed_experts"] = int32(np.arange(size) + 10_000 * (len(payloads) - 1))
            if payload["sampling_params"].get("custom_params"):
                spans = [[token, token + 1] for token in drawn]
                meta |= {
                    "top_p_token_ids": int32(spans),
                    "top_p_token_offsets": int32(range(0, 2 * len(drawn) + 1, 2)),
                }
            return json.dumps(answer).encode()

        engine.render = render
        return args, payloads

    yield start
    session.stop_servers()


def url_of(image: Image.Image) -> str:
    return encode_image_for_rollout_engine(image)


async def openai_agent(url: str, sid: str) -> float:
    def image(shown):
        return {"type": "image_url", "image_url": {"url": url_of(shown)}}

    messages = [{"role": "user", "content": [image(RED), {"type": "text", "text": "x?"}]}]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=sid, max_retries=0) as client:
        first = await client.chat.completions.create(model="m", messages=messages)
        messages.append({"role": "assistant", "content": first.choices[0].message.content})
        messages.append({"role": "user", "content": [{"type": "text", "text": "here"}, image(BLUE)]})
        await client.chat.completions.create(model="m", messages=messages)
    return 1.0


async def anthropic_agent(url: str, sid: str) -> float:
    def image(shown):
        data = url_of(shown).partition(",")[2]
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    messages = [{"role": "user", "content": [image(RED), {"type": "text", "text": "x?"}]}]
    async with httpx.AsyncClient(base_url=url, headers={"X-Api-Key": sid}, timeout=60, trust_env=False) as client:
        body = {"model": "m", "max_tokens": 400, "messages": messages}
        first = (await client.post("/v1/messages", json=body)).raise_for_status().json()
        messages.append({"role": "assistant", "content": first["content"]})
        messages.append({"role": "user", "content": [{"type": "text", "text": "here"}, image(BLUE)]})
        (await client.post("/v1/messages", json=body)).raise_for_status()
    return 1.0


@pytest.mark.parametrize(
    ("agent", "adapter_class"), [(openai_agent, OpenAIAdapter), (anthropic_agent, AnthropicAdapter)]
)
def test_turns_keep_images_experts_and_nuclei_as_those_of_a_plain_conversation(job, agent, adapter_class):
    args, payloads = job()

    async def observe(turn):
        parts = [{"type": "text", "text": "here"}, {"type": "image", "image": BLUE}]
        return [{"role": "user", "content": parts}] if turn == "look" else None

    plain = Sample(index=0, prompt=PROMPT, multimodal_inputs={"images": [RED], "videos": None})
    asyncio.run(converse(args, plain, PARAMS, observe, max_turns=3))
    asked = [payload["input_ids"] for payload in payloads]
    images = [payload["image_data"] for payload in payloads]
    payloads.clear()

    asking = session.play(args, Sample(index=0, prompt=PROMPT), PARAMS, agent, adapter_class=adapter_class)
    (played,) = asyncio.run(asking)
    assert [payload["input_ids"] for payload in payloads] == asked
    assert [payload["image_data"] for payload in payloads] == images and [len(each) for each in images] == [1, 2]
    for name in ("tokens", "response_length", "loss_mask", "rollout_log_probs"):
        assert getattr(played, name) == getattr(plain, name), name
    for name in ("rollout_routed_experts", "rollout_top_p_token_ids", "rollout_top_p_token_offsets"):
        assert torch.equal(getattr(played, name), getattr(plain, name)), name
    assert len(played.rollout_routed_experts) == len(played.tokens) - 1
    assert [image.tobytes() for image in played.multimodal_inputs["images"]] == [RED.tobytes(), BLUE.tobytes()]
    assert played.multimodal_train_inputs.keys() == plain.multimodal_train_inputs.keys()
    for name, values in plain.multimodal_train_inputs.items():
        assert torch.equal(played.multimodal_train_inputs[name], values), name
    shape = RoutedShape(num_layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS)
    data = samples_to_train_data([played], [1.0], [1.0], rollout_top_p=0.9, routed=shape)
    assert len(data.rollout_routed_experts[0]) == len(played.tokens) - 1


@pytest.mark.parametrize("url", ["/etc/hostname", "file:///etc/hostname", {"url": "/etc/hostname"}, None])
def test_an_image_that_names_a_file_of_this_machine_is_refused(job, url):
    args, payloads = job()

    async def agent(address: str, sid: str) -> float:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=sid, max_retries=0) as client:
            messages = [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]
            with pytest.raises(openai.BadRequestError, match="it must be a data: or a web address"):
                await client.chat.completions.create(model="m", messages=messages)
        return 1.0

    asyncio.run(session.play(args, Sample(index=0), PARAMS, agent))
    assert payloads == []
