"""Every mistake of the corpus is found before a GPU is reserved, and its message has all that the user needs."""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path

import pytest

from slime.flags.cluster import check_loop
from slime.flags.parse import parse_args
from tests.unit.flags import broken_files, broken_layouts, broken_settings, broken_words
from tests.unit.flags.broken_configurations import PROMPTS, Broken
from tests.unit.scripts.test_model_files import PUBLISHED, model_args

CORPUS = (*broken_words.BROKEN, *broken_layouts.BROKEN, *broken_settings.BROKEN, *broken_files.BROKEN)
PROGRAMS = ("train.py", "train_async.py")

flags_of_model = functools.cache(model_args)


def write_files(case: Broken, folder: Path) -> None:
    """Write the prompts and the checkpoint of ``case`` below ``folder``."""
    config = PUBLISHED[case.checkpoint or case.script] | case.config
    files = {
        "prompts.jsonl": PROMPTS,
        "model/config.json": json.dumps(config),
        "model/tokenizer.json": "{}",
        "model/model.safetensors": "",
    }
    for name, content in {**files, **case.files}.items():
        if content is not None:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)


def parse(case: Broken, folder: Path) -> None:
    """Run the command up to the point where it would connect to Ray."""
    write_files(case, folder)
    model = flags_of_model(case.script) if case.script else []
    args = parse_args(argv=[*model, *case.words(str(folder))])
    if case.program == "train_async.py":
        check_loop(args, "train_async.py")


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: case.mistake)
def test_a_mistake_is_named_before_a_gpu_is_taken(case, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    if case.error is None:
        parse(case, tmp_path)
        message = caplog.text
    else:
        with pytest.raises(case.error) as caught:
            parse(case, tmp_path)
        message = str(caught.value)
    assert [part for part in case.says if part not in message] == [], message


def test_the_corpus_is_large_and_names_each_mistake_once():
    assert len(CORPUS) >= 100
    assert len({case.mistake for case in CORPUS}) == len(CORPUS)


@pytest.mark.parametrize("program", PROGRAMS)
def test_without_a_mistake_the_command_is_accepted_in_silence(program, tmp_path, caplog):
    parse(Broken(mistake="none", says=(), program=program), tmp_path)
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []
