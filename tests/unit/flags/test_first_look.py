"""Errors in a command line that are found before torch, Megatron and SGLang are imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slime.flags.first_look import MATTER, first_look
from slime.flags.parse import parse_args, parse_flags
from slime.flags.table import parser_of_table, read_table
from slime.flags.words import NO_BATCH, NO_LENGTH, NO_MODEL, PEERS_FLAGS
from tests.contracts.source_tree import REPO

ENOUGH = ["--hf-checkpoint", "model", "--rollout-batch-size", "8", "--num-rollout", "2"]


def refusal(capsys, *words):
    with pytest.raises(SystemExit) as left:
        first_look(words)
    assert left.value.code == 2
    return capsys.readouterr().err


def help_of(capsys, *words):
    with pytest.raises(SystemExit) as left:
        first_look(words)
    assert left.value.code == 0
    return capsys.readouterr().out


def test_the_first_message_comes_without_the_imports_that_take_seconds():
    program = (
        "import sys; from slime.flags.first_look import first_look; first_look(sys.argv[1:]);"
        "print([name for name in ('torch', 'ray', 'megatron', 'sglang', 'transformers') if name in sys.modules])"
    )
    words = [sys.executable, "-c", program, *ENOUGH]
    assert subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=60).stdout == "[]\n"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (["--lrr", "1"], "--lrr is not a flag. Did you mean --lr"),
        (["--lr", "a"], "argument --lr: 'a' is not a number"),
        (["--n-samples-per-prompt", "0"], "0 is not a whole number of 1 or more"),
        (["--lr"], "argument --lr: expected one argument"),
        (["--colocate", "yes"], "'yes' belongs to no flag"),
        (["--advantage-estimator", "grop"], "invalid choice: 'grop'"),
        (["--sglang-tp-sizes", "2"], "--sglang-tp-sizes is not a flag"),
        (["--learning-rate", "1e-6"], "--learning-rate is not a flag. Did you mean --lr?"),
        (["--advantage-estimator", "DAPO"], "DAPO is grpo with other flags: docs/howto/dapo.md"),
        (["--timers", "x"], "--timers is not a flag: set by the training step"),
    ],
)
def test_a_wrong_word_is_refused_as_the_parser_would(word, said, capsys):
    assert said in refusal(capsys, *ENOUGH, *word)


@pytest.mark.parametrize(
    "word",
    [
        ["--advantage-estimator", "my_code.mine"],
        ["--ref-update-interval", "none"],
        ["--sglang-attention-backend", "whatever_this_machine_has"],
        ["--debug-train-only", "--sglang-flag-of-another-version", "x"],
        ["--dump-details", "folder", "--no-gradient-accumulation-fusion"],
    ],
)
def test_what_only_the_parser_can_judge_passes(word):
    words = [*ENOUGH, *word]
    assert first_look(words) == words


def test_words_of_other_trainers_are_no_flags_here_and_are_answered_with_flags():
    flags = {name for group in read_table()["groups"] for row in group["flags"] for name in row["names"]}
    assert PEERS_FLAGS.keys() & flags == set() and set(PEERS_FLAGS.values()) <= flags


def test_flags_that_every_run_needs_are_named_unless_a_file_or_a_plan_may_give_them(capsys):
    said = refusal(capsys, "--lr", "1")
    assert [message in said for message in (NO_MODEL, NO_BATCH, NO_LENGTH)] == [True] * 3
    assert first_look(["--plan"]) and first_look(["--plan=json"]) and first_look(["--custom-config-path", "x.yaml"])


def test_a_flag_that_is_newer_than_the_table_is_left_to_the_parser(monkeypatch, tmp_path, capsys):
    sources = tmp_path / "ext/new/flags.py"
    sources.parent.mkdir(parents=True)
    sources.write_text('parser.add_argument(\n    "--my-flag", type=int)')
    assert "--my-flag is not a flag" in refusal(capsys, *ENOUGH, "--my-flag", "1")
    monkeypatch.setattr("slime.flags.table.PACKAGE", tmp_path)
    assert first_look([*ENOUGH, "--my-flag", "1"])
    assert "--my-flags is not a flag" in refusal(capsys, *ENOUGH, "--my-flags", "1")


def test_other_versions_of_the_packages_are_left_to_the_parser(monkeypatch):
    monkeypatch.setattr("slime.flags.table.version", lambda package: "99.0")
    assert first_look(["--flag-of-a-later-megatron"]) == ["--flag-of-a-later-megatron"]


def test_a_run_file_holds_the_flags_by_name_and_the_command_line_comes_behind(tmp_path):
    run = tmp_path / "run.yaml"
    run.write_text(
        "hf_checkpoint: my model\nrollout-batch-size: 8\nnum-rollout: 2\nlr: 1e-6\ncolocate: true\n"
        "use-wandb: false\nperform-initialization: false\nsglang-cuda-graph-bs: [1, 2]\nload:\n"
        "apply-chat-template-kwargs: {enable_thinking: false}\nrollout-sample-hook-path: [a.b, c.d]\n"
    )
    assert first_look([str(run), "--lr", "2e-6"]) == [
        *("--hf-checkpoint=my model", "--rollout-batch-size=8", "--num-rollout=2", "--colocate"),
        *("--no-perform-initialization", "--sglang-cuda-graph-bs", "1", "2"),
        '--apply-chat-template-kwargs={"enable_thinking": false}',
        *("--rollout-sample-hook-path=a.b", "--rollout-sample-hook-path=c.d", "--lr", "2e-6"),
    ]


def test_a_later_value_replaces_that_of_a_run_file_and_a_list_of_hooks_grows(tmp_path):
    base, more = tmp_path / "base.yaml", tmp_path / "more.yaml"
    base.write_text("lr: 1e-6\nbalance-data: true\nrollout-sample-hook-path: a.b\neval-prompt-data: [x, x.jsonl]\n")
    more.write_text("lr: 2e-6\nnum-rollout: 2\nrollout-batch-size: 8\nhf-checkpoint: model\n")
    words = ["--no-balance-data", "--eval-prompt-data", "y", "y.jsonl", "--rollout-sample-hook-path", "c.d"]
    assert first_look([str(base), str(more), *words, "--lr", "3e-6", "--lr", "4e-6"]) == [
        "--rollout-sample-hook-path=a.b",
        *("--num-rollout=2", "--rollout-batch-size=8", "--hf-checkpoint=model"),
        *(*words, "--lr", "3e-6", "--lr", "4e-6"),
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("lrr: 1", "--lrr is not a flag. Did you mean --lr"),
        ("lr: 1\nlr: 2", "the key lr is there already in line 1"),
        ("- lr", "holds a list"),
        (None, "is not a file"),
    ],
)
def test_a_wrong_run_file_is_refused(content, said, tmp_path, capsys):
    run = tmp_path / "run.yml"
    if content is not None:
        run.write_text(content)
    assert said in refusal(capsys, str(run), *ENOUGH)


def test_help_shows_the_flags_that_matter_one_group_or_all(capsys):
    flags = [row["names"][0] for group in read_table()["groups"] for row in group["flags"]]
    short = help_of(capsys, "--help")
    assert [name for name in MATTER if f"\n  {name}" not in short] == [] and "--moe-ffn-hidden-size" not in short
    assert len(MATTER) == 25 and set(MATTER) <= set(flags)
    group = help_of(capsys, "--lr", "1", "--help", "weight-update")
    assert "--weight-push-failure" in group and "--hf-checkpoint" not in group
    everything = help_of(capsys, "--help", "all")
    assert [name for name in flags if name not in everything] == []
    assert "No group of flags is called 'gpus'" in help_of(capsys, "-h", "gpus")


def test_the_home_folder_may_be_named_where_no_shell_sees_it(command, prompt_file, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    run = tmp_path / "run.yaml"
    run.write_text(f"save: ~/run\nsave-interval: 1\neval-prompt-data: [one, ~/{prompt_file.name}]\neval-interval: 1\n")
    args = parse_args(argv=first_look([str(run), *command]))
    assert (args.save, args.eval_datasets[0].path) == (f"{tmp_path}/run", str(prompt_file))


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--job-secret-file ~/s", "job_secret_file", "/home/me/s"),
        ("--sglang-speculative-draft-model-path=~/d", "sglang_speculative_draft_model_path", "/home/me/d"),
        ("--sglang-crash-dump-folder=~/d", "sglang_crash_dump_folder", "/home/me/d"),
        ("--sglang-ssl-keyfile=~/d --sglang-ssl-keyfile-password=~/d", "sglang_ssl_keyfile_password", "~/d"),
        ("--sglang-ssl-keyfile=~/d", "sglang_ssl_keyfile", "/home/me/d"),
        ("--sglang-fastapi-root-path=", "sglang_fastapi_root_path", ""),
        ("--sglang-lora-paths a=~/b ~/c c=/d", "sglang_lora_paths", ["a=/home/me/b", "/home/me/c", "c=/d"]),
        ("--router-ca-cert-paths ~/a ~/b", "router_ca_cert_paths", ["/home/me/a", "/home/me/b"]),
    ],
)
def test_the_home_folder_may_stand_in_every_flag_of_a_path(words, name, value, command, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    args = parse_flags([*command, *words.split()])
    assert vars(args)[name] == value
    assert vars(parser_of_table(read_table()).parse_args([*command, *words.split()]))[name] == value
