"""Bad rows and files beside valid ones: each ends in one line that names file, row and value; odd but valid input
is accepted."""

import gzip
import json
import threading
import time

import pytest

from slime.rollout import prompts, trial_child
from slime.rollout.prompt_dataset import Dataset
from slime.rollout.prompt_files import MAX_PROMPT_CHARS
from slime.rollout.prompts import TemplateCheck, check_prompt_file
from slime.rollout.tokenizer_trial import judge
from slime.utils.chat_template import MAX_RENDERED_CHARS
from slime.utils.errors import DataError
from tests.unit.rollout.test_prompt_dataset import WordTokenizer

GOOD = b'{"input": "a", "label": "1"}\n'


def check(path, **kwargs):
    return check_prompt_file(str(path), "input", **{"label_key": "label", "tool_key": "tools"} | kwargs)


def dataset(path, tokenizer=None, **kwargs):
    keys = {"prompt_key": "input", "label_key": "label", "tool_key": "tools"}
    return Dataset(str(path), tokenizer or WordTokenizer(), None, None, **keys | kwargs)


def refusal(run, *args, **kwargs):
    """The error of ``run``; one line, short enough for a log."""
    with pytest.raises(DataError) as caught:
        run(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 700, text
    return text


def chat(**message):
    return {"input": [{"role": "user", "content": "hi"} | message], "label": "1"}


BAD_LINES = {
    "invalid UTF-8": (b'{"input": "\xff", "label": "1"}', "is not JSON ('utf-8' codec can't decode byte 0xff"),
    "deep lists": (b'{"input": "a", "label": ' + b"[" * 90000 + b"]" * 90000 + b"}", "nested deeper than 64 levels"),
    "giant integer": (b'{"input": "a", "label": ' + b"9" * 5000 + b"}", "is not JSON (Exceeds the limit"),
    "lone high surrogate": (b'{"input": "a\\ud83d", "label": "1"}', "half of a surrogate pair ('\\ud83d')"),
    "lone surrogate in metadata": (b'{"input": "a", "label": "1", "metadata": {"\\ud800": 1}}', "surrogate pair"),
    "a key twice": (b'{"input": "a", "label": "1", "label": "2"}', "the key 'label' occurs twice in one object"),
    "a key twice in metadata text": (
        json.dumps({"input": "a", "label": "1", "metadata": '{"x": 1, "x": 2}'}).encode(),
        "metadata is text but not JSON (the key 'x' occurs twice",
    ),
    "cut": (b'{"input": "a", "lab', """'{"input": "a", "lab'"""),
    "other keys": (b'{"text": "b", "answer": 1}', "has no key 'input', which --input-key names; it has text, answer"),
    "text": (b'"a"', "is a JSON str; each line must be an object"),
}


@pytest.mark.parametrize("name", BAD_LINES)
@pytest.mark.parametrize("run", [check, dataset])
def test_lines_that_do_not_decode(tmp_path, name, run):
    line, expected = BAD_LINES[name]
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD)
    text = refusal(run, path)
    assert f"{path} line 3" in text and expected in text, text


BAD_ROWS = {
    "NaN label": ({"label": float("nan")}, "label (--label-key) is nan, which no answer equals"),
    "NaN in a list of labels": ({"label": ["1", float("nan")]}, "label (--label-key) is ['1', nan]"),
    "blank": ({"input": "   "}, "the prompt is '   ', which is blank"),
    "zero width": ({"input": "\u200b\ufeff"}, "which is blank"),
    "number": ({"input": 5}, "the prompt is 5; it must be text or a list of chat messages"),
    "null": ({"input": None}, "the prompt is None"),
    "no messages": ({"input": []}, "the prompt is []"),
    "messages of text": ({"input": ["hi"]}, "message 0 of the prompt is 'hi'; it must have a role"),
    "blank beside a system message": (
        {"input": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": ""}]},
        "which is blank",
    ),
    "role is null": (chat(role=None), "message 0 of the prompt has the role None"),
    "role is a number": (chat(role=1), "message 0 of the prompt has the role 1"),
    "content is null": (chat(content=None), "message 0 of the prompt has the content None"),
    "content is an object": (chat(content={"text": "a"}), "has the content {'text': 'a'}"),
    "a part is a number": (chat(content=[{"type": "text", "text": "a"}, 3]), "has the part 3"),
    "metadata is a list": ({"metadata": [1]}, "metadata is [1]; it must be an object"),
    "text of a part is a number": (chat(content=[{"text": 5}]), "has the part"),
    "calls are a number": (chat(tool_calls=5), "has the tool_calls 5"),
    "metadata text": ({"metadata": "{"}, "metadata is text but not JSON"),
    "metadata text is deep": ({"metadata": "[" * 100_000}, "nested deeper"),
    "tool is a number": ({"tools": [1]}, "has the tool 1"),
    "tool without a name": ({"tools": [{"a": 1}]}, "has the tool {'a': 1}"),
    "tools are an object": ({"tools": {"name": "f"}}, "tools are {'name': 'f'}; they must be a list"),
    "long": ({"input": "a" * (MAX_PROMPT_CHARS + 1)}, "the prompt has 4,000,001 characters ('aaa"),
    "long parts": (chat(content=[{"type": "text", "text": "a" * 20_000_000}]), "has 20,000,000 characters"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
@pytest.mark.parametrize("run", [check, dataset])
def test_values_of_no_use(tmp_path, name, run):
    row, expected = BAD_ROWS[name]
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD + json.dumps({"input": "a", "label": "1"} | row).encode() + b"\n")
    begin = time.monotonic()
    text = refusal(run, path)
    place, _, said = text.partition(" line 2")
    assert place.endswith(str(path)) and said[0] in ": " and expected in said, text
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize(("grader", "says"), [(5, "is 5"), ("mathh", "is 'mathh'; it may be math, f1")])
def test_a_grader_that_there_is_not_is_named_with_its_line(tmp_path, grader, says):
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD + json.dumps({"input": "a", "label": "1", "metadata": {"rm_type": grader}}).encode())
    assert f"{path} line 2: rm_type in its metadata {says}" in refusal(check, path, rm_types=("math", "f1"))


@pytest.mark.parametrize(
    "row",
    [
        {"label": None},
        {"label": {"answer": [1, 2]}},
        {"label": ["a", "b"]},
        {"label": 10**60},
        {"metadata": None},
        {"metadata": {"a": {"b": [1, None, float("nan")]}}},
        {"metadata": '{"a": 1}'},
        {"tools": "[]"},
        {"input": "\ud83d\ude00"},
        chat(role="critic"),
        chat(content=["text", {"type": "image", "image": "x.png"}]),
        {"input": [{"role": "user", "content": "2+3"}, {"role": "assistant", "content": None, "tool_calls": [{}]}]},
        {"input": [{"role": "user", "content": "2+3"}, {"role": "tool", "content": {"sum": 5}}]},
        {"input": [{"role": "system", "content": ""}, {"role": "user", "content": "a"}]},
        {"input": [{"role": "system", "content": "Only this."}, {"role": "user", "parts": ["a"]}]},
        {"other": "\\ud83d", "nested": json.loads("[" * 60 + "]" * 60)},
    ],
)
def test_what_is_odd_and_legitimate_is_accepted(tmp_path, row):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"input": "a", "label": "1"} | row) + "\n")
    assert check(path) == 1
    assert len(dataset(path)) == 1


@pytest.mark.parametrize("label", [None, "  ", {"a": 1}, [None]])
@pytest.mark.parametrize("grader", ["deepscaler", "boxed_math"])
def test_a_label_that_a_grader_cannot_compare_with_is_refused_in_any_row(tmp_path, grader, label):
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD + json.dumps({"input": "a", "label": label}).encode())
    text = refusal(check, path, grader=grader)
    shown = "null" if label is None else repr(label)
    assert f"line 2: label (--label-key) is {shown}" in text
    assert f"--rm-type {grader.removeprefix('boxed_')} compares answers with it" in text
    own = {"input": "a", "label": label, "metadata": {"rm_type": grader}}
    path.write_text(json.dumps(own))
    assert "line 1" in refusal(check, path)
    for other in (None, "random", "remote_rm", "ifbench", "gpqa"):
        path.write_bytes(GOOD + json.dumps(own | {"metadata": {"rm_type": other} if other else None}).encode())
        assert check(path, grader=other) == 2


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (gzip.compress(GOOD, mtime=0), "is named .jsonl and is compressed by gzip; decompress it"),
        (b"PK\x03\x04rest", "a zip archive"),
        (b"PAR1rest", "a parquet file"),
        (GOOD.decode().encode("utf-16"), "text in UTF-16"),
        (b"", "selects no row (the file is empty)"),
        (GOOD + GOOD[:12], "line 2 is not JSON"),
        (json.dumps([{"input": "a"}], indent=1).encode(), "line 1 is not JSON"),
    ],
)
def test_files_that_are_something_else_or_cut(tmp_path, content, expected):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    text = refusal(check, path)
    assert str(path) in text and expected in text, text


def test_a_line_without_an_end_is_not_read_into_memory(tmp_path, monkeypatch):
    from slime.rollout import prompt_files

    monkeypatch.setattr(prompt_files, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD + b" " * 5000)
    assert "line 2 has more than 1000 bytes" in refusal(check, path)


# ------------------------------------------------------------------------------------------ chat templates


class Template(WordTokenizer):
    """A custom chat template, rendered by transformers' sandbox."""

    def __init__(self, template):
        self.chat_template = template

    def apply_chat_template(self, messages, *, tools, tokenize, add_generation_prompt, **kwargs):
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, _ = render_jinja_template([messages], tools=tools, chat_template=self.chat_template, **kwargs)
        return rendered[0]

    def encode(self, text, *, add_special_tokens):
        return self(text, add_special_tokens=add_special_tokens)["input_ids"]


ANY_ROLE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
STRICT = "{% for m in messages if m['role'] in ('user', 'system', 'Judge') %}{{ m['content'] }}{% endfor %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def write_chat(tmp_path, *roles):
    path = tmp_path / "data.jsonl"
    rows = [{"input": [{"role": role, "content": f"text of {role}"}], "label": "1"} for role in roles]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tried(path, template):
    """The trial at the start of a job, without its process."""
    rows = []
    num_rows = check(path, template=TemplateCheck({}, rows))
    tokenizer = Template(template)
    facts = trial_child.answers(tokenizer, json.loads(json.dumps(rows)), MAX_RENDERED_CHARS)
    judge(rows, [one for one in facts if "begins" not in one], template)
    return num_rows


def rendered(path, template):
    return len(dataset(path, Template(template), apply_chat_template=True))


@pytest.mark.parametrize("run", [tried, rendered])
def test_roles_that_the_template_leaves_out_or_does_not_name_are_refused(tmp_path, run):
    text = refusal(run, write_chat(tmp_path, "user", "narrator"), STRICT)
    assert "line 2: message 0 of the prompt has the role 'narrator', which the chat template leaves out" in text
    for role in ("User", "narrator", "bot"):
        text = refusal(run, write_chat(tmp_path, "user", role), ANY_ROLE)
        assert f"line 2: message 0 of the prompt has the role '{role}', which the chat template does not know" in text
    assert run(write_chat(tmp_path, "developer", "function", "observation", "ipython"), ANY_ROLE) == 4
    assert run(write_chat(tmp_path, "user", "Judge"), STRICT) == 2


@pytest.mark.parametrize("run", [tried, rendered])
@pytest.mark.parametrize(
    "thing",
    [
        *(
            "self",
            "lipsum",
            "namespace",
            "namespace(a=1)",
            "cycler('a')",
            "dict",
            "raise_exception",
            "messages[0].keys",
        ),
        *("messages[0].keys", "messages|map('upper')", "joiner()", "strftime_now"),
    ],
)
def test_a_template_that_prints_an_object_is_refused(tmp_path, run, thing):
    text = refusal(run, write_chat(tmp_path, "user"), ANY_ROLE + "{{ " + thing + " }}")
    assert "line 1: the chat template cannot render the prompt (it prints an object of the program, " in text
    assert "chat_template.jinja" in text


def test_a_template_that_never_ends_has_a_deadline(tmp_path, monkeypatch):
    defaults = prompts.map_with_deadline.__kwdefaults__
    monkeypatch.setattr(prompts.map_with_deadline, "__kwdefaults__", defaults | {"timeout_s": 0.3})
    monkeypatch.setattr(prompts, "POLL_INTERVAL_S", 0.05)
    stop = threading.Event()

    def loop(self, messages, **kwargs):
        while not stop.is_set():  # like an endless template, until the test is over
            pass
        return ""

    monkeypatch.setattr(Template, "apply_chat_template", loop)
    begin = time.monotonic()
    try:
        text = refusal(rendered, write_chat(tmp_path, "user"), ENDLESS)
    finally:
        stop.set()
    assert "line 1: the chat template is still rendering after 0 s" in text and "--hf-checkpoint" in text
    assert time.monotonic() - begin < 10
