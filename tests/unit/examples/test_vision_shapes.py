"""The image example: scenes by hand, disjoint sets, and files that the job's readers accept."""

import json
import random
from pathlib import Path

import pytest

from examples.vision_shapes import make_task, model, task
from slime.rollout.prompt_dataset import Dataset
from slime.rollout.sft_rollout import fill_from_conversation
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.types import Sample

SCENE = task.Scene(
    (
        task.Shape("square", "red", (0, 1), 5, (0, 0)),
        task.Shape("disc", "blue", (0, 2), 4, (1, -1)),
        task.Shape("triangle", "red", (2, 2), 6, (0, 0)),
    ),
    (255, 255, 255),
    "red",
)


def test_a_scene_is_counted_by_rows_and_painted():
    assert (SCENE.question, SCENE.rows, SCENE.answer) == ("how many red", [1, 0, 1], "2")
    assert task.worked_answer(SCENE, random.Random(0), 0.0) == "11 01 12 \\boxed{2}"
    picture = task.paint(SCENE)
    assert picture.size == (48, 48)
    middles = {
        (row, column): picture.getpixel((16 * column + 8, 16 * row + 8)) for row in range(3) for column in range(3)
    }
    assert middles.pop((0, 1)) == middles.pop((2, 2)) == task.COLOURS["red"]
    assert middles.pop((0, 2)) == task.COLOURS["blue"]
    assert set(middles.values()) == {(255, 255, 255)}


def test_no_picture_is_in_two_sets_and_counts_are_as_frequent():
    sets = task.split_scenes({"eval": 400, "grpo": 400, "sft": 800}, seed=3)
    pictures = [(scene.shapes, scene.background) for scenes in sets.values() for scene in scenes]
    assert len(set(pictures)) == len(pictures) == 1600
    assert len({task.paint(scene).tobytes() for scenes in sets.values() for scene in scenes}) == 1600
    counts = [scene.answer for scenes in sets.values() for scene in scenes]
    assert all(210 < counts.count(str(count)) < 330 for count in range(6))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    make_task.make_task(folder, 5, {"eval": 4, "grpo": 4, "sft": 8})
    return folder


def test_the_jobs_readers_take_prompts_and_demonstrations(made):
    tokenizer, processor = load_tokenizer(str(made / "hf")), load_processor(str(made / "hf"))
    kwargs = {"multimodal_keys": {"image": "images"}}
    prompts = Dataset(
        str(made / "data/eval.jsonl"), tokenizer, processor, None, prompt_key="prompt", label_key="label",
        apply_chat_template=True, **kwargs,
    )  # fmt: skip
    row = json.loads((made / "data/eval.jsonl").read_text().splitlines()[0])
    question = row["prompt"].removeprefix("<image>")
    vision = "<|vision_start|><|image_pad|><|vision_end|>"
    assert prompts[0].prompt == f"<|im_start|>user\n{vision}{question}<|im_end|>\n<|im_start|>assistant\n"
    demonstrations = Dataset(str(made / "data/sft.jsonl"), tokenizer, processor, None, prompt_key="messages", **kwargs)
    generator = MultiTurnLossMaskGenerator(tokenizer, tokenizer_type="qwen")
    sample: Sample = demonstrations[0]
    fill_from_conversation(sample, generator, processor)
    assert sample.tokens.count(model.IMAGE_ID) == 9
    trained = [token for token, mask in zip(sample.tokens[-sample.response_length :], sample.loss_mask) if mask]
    reply = json.loads((made / "data/sft.jsonl").read_text().splitlines()[0])["messages"][1]["content"]
    assert tokenizer.decode(trained).startswith(reply)
    assert sample.multimodal_train_inputs["image_grid_thw"].tolist() == [[1, 6, 6]]
