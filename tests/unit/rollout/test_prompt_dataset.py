"""Prompt files: what is read, and the errors for bad ones."""

import base64
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from slime.rollout.prompt_dataset import Dataset
from slime.rollout.prompt_files import split_path
from slime.rollout.prompts import check_prompt_file
from slime.utils.data import get_source
from slime.utils.errors import DataError
from slime.utils.types import Sample


class WordTokenizer:
    """One token per word; a chat template that shows its inputs."""

    def __call__(self, texts, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [text.split() for text in texts]}

    def apply_chat_template(self, messages, *, tools, tokenize, add_generation_prompt, **kwargs):
        assert not tokenize and add_generation_prompt
        body = " ".join(f"{m['role']}:{m['content']}" for m in messages)
        return f"{body} tools={tools} {kwargs}"


@pytest.fixture
def write(tmp_path):
    def write(*lines, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
        return str(path)

    return write


def numbered(count):
    return [{"input": f"q{i}"} for i in range(count)]


def prompts(dataset):
    return [sample.prompt for sample in dataset.samples]


def read(path, max_length=None, processor=None, **kwargs):
    return Dataset(path, WordTokenizer(), processor, max_length, **{"prompt_key": "input"} | kwargs)


@pytest.mark.parametrize(
    ("path", "name", "rows"),
    [
        ("a.jsonl", "a.jsonl", slice(None)),
        ("a.jsonl@[0:2]", "a.jsonl", slice(0, 2)),
        ("a.jsonl@[-3:]", "a.jsonl", slice(-3, None)),
        ("a@b.jsonl@[:5]", "a@b.jsonl", slice(None, 5)),
        ("a.jsonl@[5]", "a.jsonl@[5]", slice(None)),
    ],
)
def test_a_path_may_end_in_a_slice_of_rows(path, name, rows):
    assert split_path(path) == (name, rows)


def test_a_row_becomes_a_sample(write):
    tools = [{"name": "add"}]
    row = {"input": "3+4?", "label": 7, "metadata": {"source_name": "sums"}, "tools": json.dumps(tools)}
    [sample] = read(write(row), label_key="label", tool_key="tools").samples
    assert (sample.prompt, sample.label) == ("3+4?", 7)
    assert sample.metadata == {"source_name": "sums", "tools": tools}
    assert sample.multimodal_inputs is None
    assert get_source(sample) == "sums"
    assert get_source(Sample()) == "unknown"
    sample.source = "mine"
    assert get_source(sample) == "mine"


def test_the_chat_template_gets_messages_tools_and_its_arguments(write):
    path = write(
        {"input": "hi", "tools": ["t"], "metadata": '{"a": 1}'}, {"input": [{"role": "user", "content": "ho"}]}
    )
    dataset = read(path, tool_key="tools", apply_chat_template=True, apply_chat_template_kwargs={"think": False})
    assert prompts(dataset) == ["user:hi tools=['t'] {'think': False}", "user:ho tools=None {'think': False}"]
    assert dataset[0].metadata == {"a": 1, "tools": ["t"]}
    untold = read(path, tool_key="tools", apply_chat_template=True, apply_chat_template_kwargs={"tools": None})
    assert prompts(untold) == ["user:hi tools=None {}", "user:ho tools=None {}"], "its arguments win"


def test_prompts_beyond_the_length_are_left_out_in_order_and_messages_are_kept(write, caplog):
    path = write(
        {"input": "a b c"}, {"input": "a"}, {"input": [{"role": "user", "content": "a b c"}]}, {"input": "a b"}
    )
    dataset = read(path, max_length=2)
    assert prompts(dataset) == ["a", [{"role": "user", "content": "a b c"}], "a b"]
    assert "1 prompts are messages" in caplog.text
    with pytest.raises(
        DataError, match="all 1 prompts have more than 2 tokens .shortest: 3.*--rollout-max-prompt-len"
    ):
        read(path + "@[:1]", max_length=2)


def test_an_epoch_is_a_permutation_of_the_file_that_depends_on_seed_and_epoch(write):
    dataset = read(write(*numbered(6)), seed=42)
    random.seed(42 + 3)
    order = list(range(6))
    random.shuffle(order)
    dataset.shuffle(1)
    dataset.shuffle(3)
    assert prompts(dataset) == [f"q{i}" for i in order]
    other = read(dataset.path, seed=42)
    other.shuffle(3)
    assert prompts(other) == prompts(dataset)
    assert [sample.prompt for sample in dataset.origin_samples] == [f"q{i}" for i in range(6)]
    assert len(dataset) == 6


def test_placeholders_are_filled_with_the_items_of_the_row(write):
    keys = {"image": "images"}
    row = {"input": "look <image> and <image>", "images": ["a.png", {"type": "image", "image": "b.png"}]}
    [sample] = read(write(row), multimodal_keys=keys).samples
    assert sample.prompt == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look "},
                {"type": "image", "image": "a.png"},
                {"type": "text", "text": " and "},
                {"type": "image", "image": "b.png"},
            ],
        }
    ]
    with pytest.raises(DataError, match="data.jsonl line 1: the prompt has more <image>"):
        read(write({"input": "<image>"}), multimodal_keys=keys)
    with pytest.raises(DataError, match="data.jsonl line 1: items without a placeholder.*'image': 1"):
        read(write({"input": "x", "images": ["a"]}), multimodal_keys=keys)
    with pytest.raises(DataError, match="the kind 'smell'; it must be one of image, video, audio"):
        read(write({"input": "x"}), multimodal_keys={"smell": "x"})


def test_a_template_that_fails_is_named_by_the_line_it_failed_on(write):
    class Refusing(WordTokenizer):
        def apply_chat_template(self, messages, **kwargs):
            raise ValueError("no template")

    with pytest.raises(DataError, match="line 1: the chat template cannot render the prompt .no template"):
        Dataset(write({"input": "a"}), Refusing(), None, None, prompt_key="input", apply_chat_template=True)


def test_missing_files_and_other_suffixes_are_refused_by_flag(tmp_path):
    with pytest.raises(DataError, match=f"--eval-prompt-data is '{tmp_path}/no.jsonl', but there is no file"):
        check_prompt_file(f"{tmp_path}/no.jsonl", "input", flag="--eval-prompt-data")
    with pytest.raises(DataError, match="must end in .jsonl or .parquet"):
        check_prompt_file(f"{tmp_path}/data.json", "input")
    broken = tmp_path / "data.parquet"
    broken.write_bytes(b"nothing")
    with pytest.raises(DataError, match="data.parquet cannot be read as parquet"):
        check_prompt_file(str(broken), "input")


def test_a_parquet_file_without_the_column_is_refused_from_its_header(tmp_path):
    path = str(tmp_path / "data.parquet")
    pq.write_table(pa.Table.from_pylist([{"text": "a"}]), path)
    with pytest.raises(DataError, match="its columns. has no key 'input'.*it has text"):
        check_prompt_file(path, "input")


def test_nested_columns_of_parquet_are_lists_and_dicts(tmp_path):
    path = str(tmp_path / "data.parquet")
    messages = [{"role": "user", "content": "hi"}]
    pq.write_table(pa.Table.from_pylist([{"input": messages, "metadata": {"a": 1}}]), path)
    [sample] = read(path).samples
    assert sample.prompt == messages
    assert sample.metadata == {"a": 1}


def test_what_a_row_of_parquet_did_not_have_is_not_there(tmp_path):
    def called(name, **arguments):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    def tool(name, *, strict=None, **properties):
        schema = {"type": "object", "properties": properties} | ({} if strict is None else {"strict": strict})
        return {"type": "function", "function": {"name": name, "parameters": schema}}

    picture = {"role": "user", "content": [{"type": "image", "image": "x.png"}, {"type": "text", "text": "What?"}]}
    add = tool("add", a={"type": "integer"}, b={"type": "integer", "enum": [None, 1]})
    rows = [
        {
            "input": [{"role": "user", "content": "2+3"}, called("add", a=2, b=3)],
            "tools": [add, tool("weather", strict=True, city={"type": "string"})],
            "metadata": {"seed": 1},
        },
        {
            "input": [{"role": "user", "content": "Rain?"}, called("weather", city="Oslo")],
            "tools": [add],
            "metadata": {"rm_type": "math", "tools": [add]},
        },
    ]
    table, lines = tmp_path / "data.parquet", tmp_path / "data.jsonl"
    pq.write_table(pa.Table.from_pylist(rows), table)
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    from_table, from_lines = (read(str(path), tool_key="tools").samples for path in (table, lines))
    assert [sample.prompt for sample in from_table] == [row["input"] for row in rows]
    assert [sample.metadata for sample in from_table] == [sample.metadata for sample in from_lines]
    assert from_table[0].metadata == {"seed": 1, "tools": rows[0]["tools"]}

    pq.write_table(pa.Table.from_pylist([{"input": [picture]}]), table)
    assert read(str(table)).samples[0].prompt == [picture]

    # A JSON row may contain null itself.
    meant = {"input": [{"role": "user", "content": "Rain?"}, called("weather", city=None)], "metadata": {"x": None}}
    lines.write_text(json.dumps(meant))
    [sample] = read(str(lines)).samples
    assert (sample.prompt, sample.metadata) == (meant["input"], {"x": None})


def test_an_image_that_cannot_be_used_is_found_before_the_run_with_its_row(write, tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "x.png")
    good, cut = (tmp_path / "x.png").read_bytes(), (tmp_path / "x.png").read_bytes()[:40]
    keys = {"image": "images"}
    text = base64.b64encode(good).decode()
    sources = [str(tmp_path / "x.png"), f"data:image/png;base64,{text}", "http://127.0.0.1/never-asked.png"]
    rows = [{"input": "<image>", "images": [source]} for source in sources]
    assert check_prompt_file(write(*rows, {"input": "no image"}), "input", multimodal_keys=keys) == 4
    with pytest.raises(DataError, match=r"line 2: The image 'no.png' of a prompt cannot be opened"):
        check_prompt_file(write(rows[0], {"input": "<image>", "images": ["no.png"]}), "input", multimodal_keys=keys)

    path = tmp_path / "data.parquet"
    images = [[{"bytes": good, "path": None}], [{"bytes": cut, "path": None}]]
    pq.write_table(pa.table({"input": ["a <image>"] * 2, "images": images}), path)
    assert check_prompt_file(f"{path}@[0:1]", "input", multimodal_keys=keys) == 1
    with pytest.raises(DataError, match=r"data.parquet.* 2: The image \(40 bytes\) of a prompt cannot be decoded"):
        check_prompt_file(str(path), "input", multimodal_keys=keys)
    [sample] = Dataset(f"{path}@[0:1]", None, object(), None, prompt_key="input", multimodal_keys=keys).samples
    assert sample.multimodal_inputs["images"][0].size == (4, 4)
    with pytest.raises(DataError, match=r"data.parquet.* 2: The image \(40 bytes\)"):
        Dataset(str(path), None, object(), None, prompt_key="input", multimodal_keys=keys)
