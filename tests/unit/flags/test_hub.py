"""Hub names, with a cache in huggingface_hub's layout; without the network."""

from __future__ import annotations

import json
import shutil

import pytest

from slime.flags.hub import data_file, derive_hub_names
from slime.flags.parse import GROUPS, slime_validate_args
from slime.flags.parser import Parser
from slime.rollout.prompt_files import read_file
from slime.utils.errors import ConfigError, DataError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Put files into the cache, as links to blobs, under a repository's name."""
    import datasets
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")

    def put(repo, files):
        folder = cache / repo
        snapshot = folder / "snapshots" / COMMIT
        (folder / "blobs").mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs/main").write_text(COMMIT)
        for number, (name, content) in enumerate(files.items()):
            (folder / f"blobs/{number}").write_bytes(content)
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / name).symlink_to(folder / f"blobs/{number}")
        return snapshot

    return put


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


GSM8K = {
    "README.md": b"---\nconfigs:\n"
    b"- config_name: main\n  data_files:\n  - {split: train, path: main/a.jsonl}\n"
    b"  - {split: test, path: main/b.jsonl}\n"
    b"- config_name: socratic\n  data_files:\n  - {split: train, path: socratic/a.jsonl}\n---\n",
    "main/a.jsonl": lines({"question": "1+1?", "answer": "2"}, {"question": "1+2?", "answer": "3"}),
    "main/b.jsonl": lines({"question": "2+2?", "answer": "4"}),
    "socratic/a.jsonl": lines({"question": "Why?", "answer": "So"}),
}


def test_a_data_set_of_the_hub_becomes_a_file_that_is_made_once(cached):
    snapshot = cached("datasets--openai--gsm8k", GSM8K)
    file = data_file("openai/gsm8k/main", "--prompt-data")
    assert list(read_file(file)) == [
        {"question": "1+1?", "answer": "2"},
        {"question": "1+2?", "answer": "3"},
    ]
    assert [row["answer"] for row in read_file(data_file("openai/gsm8k/main@test", "--prompt-data"))] == ["4"]
    assert [row["answer"] for row in read_file(data_file("openai/gsm8k/main@train@[1:2]", "--prompt-data"))] == ["3"]
    shutil.rmtree(snapshot / "main")  # the file exists, so nothing is read again
    assert data_file("openai/gsm8k/main", "--prompt-data") == file


def test_a_config_that_is_not_named_or_a_split_that_is_not_there_is_an_error(cached):
    cached("datasets--openai--gsm8k", GSM8K)
    with pytest.raises(DataError, match=r"(?s)--prompt-data openai/gsm8k: .*socratic.*NAME/CONFIG@SPLIT"):
        data_file("openai/gsm8k", "--prompt-data")
    with pytest.raises(DataError, match=r"dev.*NAME/CONFIG@SPLIT"):
        data_file("openai/gsm8k/main@dev", "--prompt-data")


@pytest.mark.parametrize(
    "path", ["data/rows.jsonl", "/data/rows", "gym:countdown?size=3", "a/b/mix.yaml", "x.parquet@[0:3]"]
)
def test_files_and_other_readers_stay_as_they_are(path, cached):
    assert data_file(path, "--prompt-data") == path


def test_a_model_of_the_hub_becomes_its_folder_in_the_cache(cached, make_args, model_folder):
    files = {path.name: path.read_bytes() for path in model_folder.iterdir()}
    snapshot = cached("models--Qwen--Qwen3-0.6B", files)
    args = make_args("--hf-checkpoint", "Qwen/Qwen3-0.6B", without=("--ref-load",))
    slime_validate_args(args, Parser(GROUPS))
    assert (args.hf_checkpoint, args.load) == (str(snapshot), str(snapshot))


def test_without_cache_and_network_the_message_is_the_command_that_fetches_it(cached, make_args):
    args = make_args("--hf-checkpoint", "Qwen/Qwen3-0.6B")
    with pytest.raises(ConfigError, match=r"--hf-checkpoint: Qwen/Qwen3-0.6B .* hf download Qwen/Qwen3-0.6B$"):
        slime_validate_args(args, Parser(GROUPS))
    with pytest.raises(DataError, match=r"hf download --repo-type dataset openai/gsm8k$"):
        data_file("openai/gsm8k", "--prompt-data")
    args.runs_here = False  # a plan needs neither
    derive_hub_names(args)
    assert args.hf_checkpoint == "Qwen/Qwen3-0.6B"
