"""Questions of reasoning-gym as prompts, and its scorers in isolation, with a fake of the package."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from argparse import Namespace
from pathlib import Path

import pytest

from slime.ext.environments import gym
from slime.isolation.view import IsolationError, check_isolation
from slime.rollout.prompt_dataset import Dataset
from slime.rollout.prompt_files import read_rows
from slime.rollout.prompts import check_prompt_file
from slime.rollout.rm_hub import RM_TYPES, async_rm
from slime.rollout.rm_hub import gym as scores
from slime.utils.errors import DataError
from slime.utils.types import Sample

STAND_IN = '''
import random


class Sums:
    """``a + b``; the scorer evaluates what it gets, as some of reasoning-gym's do."""

    def __init__(self, size, seed, most=9):
        self.size, self.seed, self.most = size, seed, most

    def __getitem__(self, index):
        rng = random.Random(self.seed + index)
        a, b = rng.randint(1, self.most), rng.randint(1, self.most)
        print("a task may print")
        return {"question": f"{a} + {b}?", "answer": str(a + b), "metadata": {"sum": a + b, "set": {a, b}}}

    def score_answer(self, answer, entry):
        return 1.0 if eval(answer) == entry["metadata"]["sum"] else 0.01


def create_dataset(name, **config):
    if name not in ("sums", "leg_counting"):
        raise ValueError(f"Dataset '{name}' not registered")
    return Sums(**config)
'''
NEEDED = ("reasoning_gym", "cellpylib", "pycosat", "zss")


def can_isolate():
    try:
        check_isolation()
    except IsolationError:
        return False
    return True


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Child processes find the fake in the package's place, even in isolation."""
    (tmp_path / "reasoning_gym").mkdir()
    (tmp_path / "reasoning_gym/__init__.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    worker = scores._WORKER_FILE.read_text().replace("from __future__ import annotations\n", "")
    (tmp_path / "worker.py").write_text(
        f"import sys, types\nmodule = types.ModuleType('reasoning_gym')\nexec({STAND_IN!r}, module.__dict__)\n"
        f"sys.modules['reasoning_gym'] = module\n{worker}"
    )
    monkeypatch.setattr(scores, "_WORKER_FILE", tmp_path / "worker.py")
    scores._pool.cache_clear()
    yield Namespace(unsafe_local_sandbox=not can_isolate())
    for is_unsafe in (True, False):
        scores._pool(is_unsafe).close()
    scores._pool.cache_clear()


READERS = {"gym:": "slime.ext.environments.gym.read_task"}


def rows_of(path):
    return [row for _, row in read_rows(path, readers=READERS)]


def test_questions_depend_on_task_and_config_alone(stand_in):
    rows = rows_of("gym:sums?size=40&seed=3")
    assert len(rows) == 40 and rows_of("gym:sums?size=40&seed=3@[35:]") == rows[35:]
    assert rows_of("gym:sums?size=40&seed=4")[:39] == [
        row | {"metadata": row["metadata"] | {"gym": {**row["metadata"]["gym"], **own}}}
        for number, row in enumerate(rows[1:])
        for own in [{"index": number, "config": {"size": 40, "seed": 4}}]
    ]
    assert rows[7]["metadata"] == {
        "rm_type": "gym",
        "source_name": "sums",
        "gym": {"task": "sums", "config": {"size": 40, "seed": 3}, "index": 7},
    }


def test_config_values_are_json_and_a_system_prompt_is_a_message(stand_in):
    assert gym.parse_task("gym:x?a=1.5&b=[1,2]&c=word&d=true") == (
        "x",
        {"size": 500, "seed": 0, "a": 1.5, "b": [1, 2], "c": "word", "d": True},
    )
    (row,) = rows_of("gym:sums?size=1&most=1&system=Be+brief.")
    assert row["input"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    assert row["label"] == "2"


def test_the_ordinary_data_set_reads_checks_and_shuffles_them(stand_in):
    path = "gym:sums?size=50&seed=1"
    assert check_prompt_file(path, "input", label_key="label", rm_types=RM_TYPES, readers=READERS) == 50
    read = [Dataset(path, None, None, None, prompt_key="input", label_key="label", readers=READERS) for _ in range(2)]
    for dataset in read:
        dataset.shuffle(1)
    assert [sample.prompt for sample in read[0].samples] == [sample.prompt for sample in read[1].samples]
    assert read[0].digests[""].before == read[1].digests[""].before
    other = Dataset(
        "gym:sums?size=50&seed=2", None, None, None, prompt_key="input", label_key="label", readers=READERS
    )
    assert other.digests[""].before != read[0].digests[""].before


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gym:products", "Dataset 'products' not registered"),
        ("gym:sums?colour=1", "unexpected keyword argument 'colour'"),
        ("gym:sums?size=0", "size is 0; it must be a number of questions"),
        ("gym:sums?size=many", "size is 'many'"),
    ],
)
def test_a_wrong_task_or_config_is_refused_by_name(stand_in, path, message):
    with pytest.raises(DataError, match=message):
        rows_of(path)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<think>1 or <answer>2</answer></think> <answer> 3 </answer>", "3"),
        ("<answer>1</answer> no: <answer>2\n</answer>", "2"),
        (" 42 \n", "42"),
    ],
)
def test_the_answer_is_what_stands_in_the_last_tags_or_all_that_was_said(response, answer):
    assert scores.answer_of(response) == answer


def graded(args, answer, **metadata):
    own = {"task": "sums", "config": {"size": 9, "seed": 0, "most": 1}, "index": 0}
    sample = Sample(response=answer, metadata={"rm_type": "gym", "gym": own} | metadata)
    return asyncio.run(async_rm(args, sample))


def test_the_tasks_scorer_is_the_reward(stand_in, caplog):
    caplog.set_level("INFO")
    assert graded(stand_in, "<answer>1 + 1</answer>") == 1.0
    assert graded(stand_in, "3") == 0.01
    assert graded(stand_in, "not a number") == 0.0
    assert "The scorer of sums refused the answer of sample None: SyntaxError" in caplog.text


def test_what_the_policy_wrote_is_evaluated_where_it_can_do_nothing(stand_in, tmp_path):
    if stand_in.unsafe_local_sandbox:
        pytest.skip("this machine cannot isolate programs")
    proof = tmp_path / "escaped"
    assert graded(stand_in, f"open({str(proof)!r}, 'w').close() or 2") == 0.0
    assert graded(stand_in, f"len(open({str(Path(__file__))!r}).read()) and 2") == 0.0
    assert graded(stand_in, "len(open('/etc/passwd').read()) and 2") == 1.0  # the sandbox's own
    assert not proof.exists()


def test_an_answer_without_end_scores_nothing_and_the_next_one_is_scored(stand_in, monkeypatch):
    monkeypatch.setattr(scores.ScoreWorker.__init__, "__kwdefaults__", {"is_unsafe": False, "time_limit_s": 0.3})
    assert graded(stand_in, "[0 for _ in iter(int, 1)]") == 0.0
    assert graded(stand_in, "__import__('os')._exit(3)") == 0.0
    assert graded(stand_in, "2") == 1.0


@pytest.mark.skipif(not all(map(importlib.util.find_spec, NEEDED)), reason="the extra gym is not installed")
@pytest.mark.parametrize("task", ["leg_counting", "countdown", "word_ladder"])
def test_the_package_scores_its_own_answers(task):
    rows = rows_of(f"gym:{task}?size=3&seed=5")
    assert rows == json.loads(json.dumps(rows))
    args = Namespace(unsafe_local_sandbox=not can_isolate())
    for row in rows:
        sample = Sample(response=f"<answer>{row['label']}</answer>", metadata=row["metadata"])
        assert asyncio.run(async_rm(args, sample)) == 1.0
