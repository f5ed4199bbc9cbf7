"""The tiny task: questions and answers by hand, disjoint sets, and a reward that requires a finished response."""

import asyncio
import json
import random
from argparse import Namespace
from pathlib import Path

import pytest

from examples.tiny_arithmetic import make_task, model, reward, task
from examples.tiny_arithmetic.tokenizer import END, END_ID, VOCAB_SIZE, build_tokenizer
from slime.utils.types import Sample


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    make_task.make_task(folder, seed=2026)
    return folder


def rows(made: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (made / f"data/{name}.jsonl").read_text().splitlines()]


def test_a_question_its_answer_and_its_worked_answer() -> None:
    operands = (7, 2, 9, 4, 8)
    assert task.question(operands) == "7+2+9+4+8 mod 10"
    assert task.answer(operands) == "0"
    assert task.worked_answer(operands, random.Random(0)) == "7 29 98 42 80 \\boxed{0}"
    assert task.operands_of(task.question(operands)) == operands


def test_the_operands_of_sft_grpo_and_eval_are_disjoint_and_none_occurs_twice(made: Path) -> None:
    sets = {
        "sft": [row["messages"][0]["content"] for row in rows(made, "sft")],
        "grpo": [row["prompt"] for row in rows(made, "grpo")],
        "eval": [row["prompt"] for row in rows(made, "eval")],
    }
    operands = {name: {task.operands_of(text) for text in texts} for name, texts in sets.items()}
    assert {name: len(found) for name, found in operands.items()} == {name: len(texts) for name, texts in sets.items()}
    assert not operands["sft"] & operands["grpo"]
    assert not operands["sft"] & operands["eval"]
    assert not operands["grpo"] & operands["eval"]
    assert len(sets["eval"]) >= 500


def test_the_tokenizer_gives_back_ascii_and_knows_the_end_of_a_turn(made: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made / "hf")
    prompt = [{"role": "user", "content": "7+2+9+4+8 mod 10"}]
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\n7+2+9+4+8 mod 10<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == 22
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == END_ID
    assert len(tokenizer) == VOCAB_SIZE == len(build_tokenizer())
    everything = "".join(map(chr, range(32, 127)))
    assert tokenizer.decode(tokenizer(everything, add_special_tokens=False)["input_ids"]) == everything


def test_the_recipe_names_the_dimensions_of_the_model() -> None:
    recipe = (Path(__file__).parents[3] / "scripts/models/tiny-arithmetic.sh").read_text().split()
    flags = dict(zip(recipe, recipe[1:]))
    assert flags["--num-layers"] == str(model.NUM_LAYERS)
    assert flags["--hidden-size"] == str(model.HIDDEN_SIZE)
    assert flags["--ffn-hidden-size"] == str(model.FFN_SIZE)
    assert flags["--num-attention-heads"] == str(model.NUM_HEADS)
    assert flags["--num-query-groups"] == str(model.NUM_KV_HEADS)
    assert flags["--kv-channels"] == str(model.HEAD_DIM)
    assert flags["--vocab-size"] == str(VOCAB_SIZE)


def answered(response: str, status: Sample.Status = Sample.Status.COMPLETED) -> Sample:
    return Sample(response=response, label="0", status=status)


@pytest.mark.parametrize(
    ("response", "points", "why"),
    [
        ("7 29 98 42 80 \\boxed{0}" + END, 1.0, "right, and it ends"),
        ("\\boxed{0}", 1.0, "right, the end of the turn stripped"),
        ("\\boxed{3}" + END, 0.0, "wrong"),
        ("\\boxed{3} \\boxed{0}" + END, 1.0, "the last box counts"),
        ("\\boxed{0}0}" + END, 0.0, "more behind the box, though it ends in a brace"),
        ("\\boxed{0} 1" + END, 0.0, "something behind the box"),
        ("the answer is 0" + END, 0.0, "no box"),
        ("" + END, 0.0, "nothing"),
    ],
)
def test_grades(response: str, points: float, why: str) -> None:
    assert reward.grade(answered(response)) == points, why


def test_the_plug_in_takes_one_sample_or_a_list() -> None:
    args = Namespace()
    right, wrong = answered("\\boxed{0}"), answered("\\boxed{1}")
    assert asyncio.run(reward.reward(args, right)) == 1.0
    assert asyncio.run(reward.reward(args, [right, wrong])) == [1.0, 0.0]
