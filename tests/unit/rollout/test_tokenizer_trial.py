"""A model folder whose tokenizer or template never ends, or uses all memory, is refused by name at the start."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from slime.rollout import tokenizer_trial
from slime.rollout.prompts import LengthCheck, PromptLimit
from slime.rollout.tokenizer_trial import TokenizerTrial
from slime.utils.errors import ConfigError, DataError

USER = [{"role": "user", "content": "hi"}]
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path):
    """Write a model's tokenizer with this regular expression and template."""

    def write(*, regex: str = r"\s+", template: str = PLAIN, is_normalizer: bool = False) -> str:
        tokenizer = Tokenizer(models.WordLevel({"hi": 0, "[UNK]": 1}, unk_token="[UNK]"))
        if is_normalizer:
            tokenizer.normalizer = normalizers.Replace(Regex(regex), "")
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(regex), "isolated")
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return write


def tried(folder: str, *, has_template: bool = True, **kwargs) -> None:
    with TokenizerTrial(folder, has_template=has_template, trusts_code=False) as trial:
        if has_template:
            trial.template(kwargs).add(USER, None, "data.jsonl line 1")
        trial.finish()


@pytest.mark.parametrize("has_template", [True, False])
def test_a_tokenizer_of_usual_make_passes(folder, has_template):
    tried(folder(), has_template=has_template)


@pytest.mark.parametrize("is_normalizer", [True, False])
@pytest.mark.parametrize("regex", ["(a+)+$", r"(\w+\s?)+$", r"(?=(x+x+)+y)|(.|\s)+?\z\b"])
def test_a_regular_expression_without_an_end_is_refused_by_its_file(folder, regex, is_normalizer):
    with pytest.raises(
        ConfigError, match=r"tokenizer of .* \(tokenizer.json\) .*regular expression.*Download the model"
    ):
        tried(folder(regex=regex, is_normalizer=is_normalizer), has_template=False)


def test_a_template_without_an_end_is_killed_and_named_by_its_file_and_row(folder, monkeypatch):
    monkeypatch.setattr(tokenizer_trial, "RENDER_TIMEOUT_S", 1.0)
    began = time.monotonic()
    with pytest.raises(
        DataError, match=r"data.jsonl line 1: the chat template was still running after 1 s.*chat_template.j"
    ):
        tried(folder(template=ENDLESS))
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ 'x' * 10 ** 11 }}", "it takes more than 4 GiB"),
        ("{{ self }}", "it prints an object of the program, '<TemplateReference None>'"),
        ("{{ raise_exception('no ' ~ flavour) }}", "no vanilla"),
    ],
)
def test_a_template_that_makes_no_prompt_is_refused_with_the_row(folder, template, says):
    with pytest.raises(
        DataError, match=f"line 1: the chat template cannot render the prompt .{says}.*chat_template.j"
    ):
        tried(folder(template=template), flavour="vanilla")


def measured(folder: str, prompts: list, *, limit: int, leaves_out_above: int | None = None, kwargs=None) -> None:
    with TokenizerTrial(folder, has_template=kwargs is not None, trusts_code=False) as trial:
        lengths = trial.lengths(PromptLimit(limit, "the context is small", "--flag", leaves_out_above), kwargs)
        for number, prompt in enumerate(prompts, start=1):
            lengths.add(prompt, None, f"data.jsonl line {number}")
        trial.finish()


SHORT, LONG = "hi " * 4, "hi " * 40


@pytest.mark.parametrize("kwargs", [None, {}])
def test_the_first_prompt_that_no_engine_has_room_for_is_refused_with_its_tokens(folder, kwargs):
    as_prompt = (lambda text: text) if kwargs is None else (lambda text: [{"role": "user", "content": text}])
    prompts = [as_prompt(text) for text in (SHORT, LONG, SHORT, LONG + LONG)]
    said = "line 2: the prompt has 80 tokens, and at most 79 fit: the context is small. --flag 79 leaves out"
    with pytest.raises(DataError, match=said):
        measured(folder(), prompts, limit=79, kwargs=kwargs)
    measured(folder(), prompts[:3], limit=80, kwargs=kwargs)


def test_a_prompt_that_the_flag_leaves_out_may_be_of_any_length(folder):
    measured(folder(), [SHORT, LONG + LONG], limit=79, leaves_out_above=100)
    with pytest.raises(DataError, match="line 1: the prompt has 80 tokens"):
        measured(folder(), [LONG], limit=79, leaves_out_above=80)


def test_only_the_longest_prompts_of_those_with_more_bytes_than_the_limit_are_counted():
    lengths = LengthCheck(PromptLimit(60, "", "", None), None)
    for number in range(1, 101):
        lengths.add("\u00e9" * (number % 50), None, f"line {number}")  # of two bytes
    kept = [(where, len(text)) for where, text, _ in lengths.rows]
    assert kept == [(f"line {number}", number % 50) for number in (46, 47, 48, 49, 96, 97, 98, 99)]
    few = LengthCheck(PromptLimit(98, "", "", None), None)
    few.add("\u00e9" * 49, None, "line 1")
    assert few.rows == []
