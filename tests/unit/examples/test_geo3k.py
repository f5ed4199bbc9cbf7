"""Conversations about images: what the engine receives, which tokens are trained, and a tool that returns an image."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from examples.geo3k_vlm_multi_turn import rollout
from examples.geo3k_vlm_multi_turn.base_env import BaseInteractionEnv
from examples.vision_shapes import model
from slime.flags.parse import parse_args
from slime.rollout.multi_turn import converse
from slime.rollout.sglang_rollout import GenerateState, generate
from slime.utils.processing_utils import load_tokenizer, open_image
from slime.utils.types import Sample
from tests.contracts.source_tree import REPO
from tests.e2e.vision_jobs import write_rows
from tests.unit import talking_engine

PARAMS = {"temperature": 1.0, "max_new_tokens": 500}
PROMPT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>x?<|im_end|>\n<|im_start|>assistant\n"


def picture(colour: str, size: tuple[int, int] = (32, 48)) -> Image.Image:
    return Image.new("RGB", size, colour)


def call(answer: str, name: str = "calc_score") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"answer": "{answer}"}}}}</tool_call>'


@pytest.fixture
def see(talk):
    """``see(policy)`` returns args of a model with a processor, and its engine's requests, counted like SGLang's."""

    def start(policy, **attributes):
        args, engine = talk(policy, **attributes)
        model.write_processor(Path(args.hf_checkpoint))
        engine.script.tokenizer = load_tokenizer(args.hf_checkpoint)
        GenerateState.clear_instances()
        plain, payloads = engine.render, []

        def render(request, *values):
            answer = json.loads(plain(request, *values))
            payloads.append(request.payload)
            for image in map(open_image, request.payload["image_data"]):
                answer["meta_info"]["prompt_tokens"] += image.width * image.height // 16**2 - 1
            return json.dumps(answer).encode()

        engine.render = render
        return args, payloads

    return start


def ask() -> Sample:
    return Sample(index=0, prompt=PROMPT, label="4", multimodal_inputs={"images": [picture("red")], "videos": None})


def test_a_wrong_answer_is_called_so_and_another_one_is_given(see):
    turns = [call("3"), call("4"), "\\boxed{4}"]
    args, _ = see(lambda prompt: turns[prompt.count("assistant") - 1], max_turns=3)
    sample = asyncio.run(rollout.generate(args, ask(), PARAMS))
    assert sample.status is Sample.Status.COMPLETED and sample.metadata["round_number"] == 3
    assert [word in sample.response for word in ("score 0", "score 1", "\\boxed{4}")] == [True] * 3
    assert sample.tokens.count(model.IMAGE_ID) == 6
    tokenizer = load_tokenizer(args.hf_checkpoint)
    drawn = [t for t, mask in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True) if mask]
    assert tokenizer.decode(drawn) == "".join(f"{turn}<|im_end|>" for turn in turns)


@pytest.mark.parametrize("drawn", ["<|image_pad|>", "<|video_pad|>"])
def test_a_token_of_a_picture_that_the_policy_drew_ends_the_conversation(see, drawn, monkeypatch):
    monkeypatch.setattr(talking_engine, "drawn", lambda tokenizer, text: tokenizer.encode(text))
    args, payloads = see(lambda prompt: drawn + call("3"), max_turns=3)
    sample = asyncio.run(rollout.generate(args, ask(), PARAMS))
    assert sample.status is Sample.Status.TRUNCATED and len(payloads) == 1
    assert all(sample.loss_mask) and sample.tokens.count(model.IMAGE_ID) == 6 + (drawn == "<|image_pad|>")
    sample.status = Sample.Status.ABORTED  # as if it had been aborted there and returned
    asyncio.run(generate(args, sample, PARAMS))
    assert sample.status is Sample.Status.TRUNCATED and len(payloads) == 1


def test_an_image_of_a_tool_goes_to_engine_and_trainer_behind_that_of_the_prompt(see):
    args, payloads = see(lambda prompt: ["look", "done"][prompt.count("assistant") - 1])
    shown = BaseInteractionEnv().format_observation({"obs_str": "here", "images": [picture("blue", (64, 32))]})

    async def observe(turn):
        return [shown] if turn == "look" else None

    sample, first = ask(), ask()
    asyncio.run(converse(args, sample, PARAMS, observe, max_turns=3))
    assert sample.status is Sample.Status.COMPLETED
    assert [image.size for image in sample.multimodal_inputs["images"]] == [(32, 48), (64, 32)]
    assert sample.multimodal_train_inputs["image_grid_thw"].tolist() == [[1, 6, 4], [1, 4, 8]]
    assert len(sample.multimodal_train_inputs["pixel_values"]) == 24 + 32
    assert [len(payload["image_data"]) for payload in payloads] == [1, 2]
    assert [payload["input_ids"].count(model.IMAGE_ID) for payload in payloads] == [1, 2]
    where = [index for index, token in enumerate(sample.tokens) if token == model.IMAGE_ID]
    assert len(where) == 6 + 8
    masks = [0] * (len(sample.tokens) - sample.response_length) + sample.loss_mask
    assert not any(masks[index] for index in where) and sum(masks) == len("look") + len("done") + 2

    # Restarted, it has only the prompt's image.
    sample.response, sample.response_length, sample.loss_mask, sample.rollout_log_probs = "", 0, None, None
    asyncio.run(converse(args, sample, PARAMS, observe, max_turns=1))
    assert len(sample.multimodal_inputs["images"]) == 1 and sample.tokens.count(model.IMAGE_ID) == 6
    assert first.multimodal_inputs["images"][0].size == (32, 48)


@pytest.mark.parametrize("name", ["geo3k_vlm", "geo3k_vlm_multi_turn"])
def test_a_script_submits_what_passes_every_check_for_qwen3_5(name, tmp_path, monkeypatch):
    model.write_model(tmp_path / "Qwen3.5-4B", 3, "qwen3_5")
    write_rows(tmp_path / "geo3k/train.parquet")
    record = tmp_path / "record"
    script = f"examples/{name}/run_{name}.sh --no-bf16 --rollout-max-response-len 64"
    command = f'ray() {{ printf "%s\\n" "$@" >"{record}"; }}; export -f ray; exec {script}'
    variables = {"SLIME_SCRIPT_EXTERNAL_RAY": "1", "BASE_DIR": str(tmp_path), "MODEL": "Qwen3.5-4B", "NUM_GPUS": "1"}
    subprocess.run(["bash", "-c", command], env=dict(os.environ) | variables, cwd=REPO, check=True, timeout=120)
    job = record.read_text().splitlines()
    monkeypatch.chdir(REPO)
    args = parse_args(argv=job[job.index("--") + 3 :])
    assert args.multimodal_keys == {"image": "images"} and args.colocate
    assert (args.custom_generate_function_path is None) == (name == "geo3k_vlm")
