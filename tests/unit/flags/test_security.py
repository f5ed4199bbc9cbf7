"""Where the job's secret comes from, and what is never written down."""

from __future__ import annotations

import json
import logging
import stat
import threading
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor

import pytest

from slime.flags.observability import derive_observability
from slime.flags.security import (
    REDACTED,
    check_security,
    derive_job_secret,
    is_secret,
    job_secret,
    redacted,
    redacted_words,
    without_credentials,
)
from slime.utils.errors import ConfigError


def flags(**given) -> Namespace:
    return Namespace(**{"job_secret_file": None, "no_job_secret": False} | given)


def derived(**given) -> str | None:
    args = flags(**given)
    derive_job_secret(args)
    return job_secret(args)


def test_every_job_has_a_secret_of_its_own_and_namespaces_without_one_have_none():
    first, second = derived(), derived()
    assert first and second and first != second and len(first) >= 40
    assert job_secret(Namespace()) is None


@pytest.mark.parametrize("flag", ["sglang_api_key", "sglang_admin_api_key", "router_api_key"])
def test_a_key_of_the_command_line_is_the_jobs_secret(flag):
    assert derived(**{flag: "mine"}) == "mine"


def test_no_job_secret_turns_it_off_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert derived(no_job_secret=True) is None
    assert "runs code in its engines" in caplog.text


def test_a_file_is_made_for_its_owner_alone_and_read_by_the_next_job(tmp_path):
    path = tmp_path / "secret"
    made = derived(job_secret_file=str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert derived(job_secret_file=str(path)) == made == path.read_text().strip()


def test_jobs_that_start_at_once_make_one_secret(tmp_path):
    together = threading.Barrier(4)

    def start(path):
        together.wait(20)
        return derived(job_secret_file=str(path))

    with ThreadPoolExecutor(4) as threads:
        for number in range(200):
            path = tmp_path / f"secret-{number}"
            assert set(threads.map(start, [path] * 4)) == {path.read_text().strip()}
    assert len(list(tmp_path.iterdir())) == 200  # nothing is left beside them


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [("", 0o600, "one word"), ("two words", 0o600, "one word"), ("fine", 0o644, "has mode 0644.*chmod 600")],
)
def test_a_file_that_is_no_secret_is_refused(tmp_path, text, mode, message):
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=message):
        derived(job_secret_file=str(path))


def test_a_folder_that_is_not_there_is_an_error_of_the_flag(tmp_path):
    with pytest.raises(ConfigError, match="--job-secret-file .* cannot be read or made"):
        derived(job_secret_file=str(tmp_path / "no/secret"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"no_job_secret": True, "sglang_api_key": "a"}, "--no-job-secret turns off what --sglang-api-key"),
        ({"no_job_secret": True, "job_secret_file": "f"}, "turns off what --job-secret-file"),
        ({"job_secret_file": "f", "router_api_key": "a"}, "--job-secret-file and --router-api-key both"),
        ({"sglang_enable_http2": True}, "--sglang-enable-http2 starts a server that no secret can guard"),
        ({"sglang_admin_api_key": "a", "sglang_api_key": "b"}, "--sglang-admin-api-key and --sglang-api-key differ"),
    ],
)
def test_two_secrets_are_one_too_many(given, message):
    [found] = check_security(flags(**given))
    assert message in found


def test_one_secret_is_fine():
    for given in ({}, {"sglang_api_key": "a", "sglang_admin_api_key": "a"}, {"job_secret_file": "f"}):
        assert list(check_security(flags(**given))) == []


def test_names_of_secrets_are_told_from_names_of_columns():
    for name in ("wandb_key", "--sglang-api-key", "job_secret", "search_api_key", "router_oracle_password", "API_KEY"):
        assert is_secret(name), name
    for name in ("HF_TOKEN", "GITHUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "PRIVATE_KEY", "HUGGING_FACE_HUB_TOKEN"):
        assert is_secret(name), name
    for name in (
        "input_key",
        "label_key",
        "reward_key",
        "job_secret_file",
        "pad_token",
        "wandb_key_file",
        "tool_key",
        "RAY_AUTH_TOKEN_PATH",
        "INPUT_KEY",
    ):
        assert not is_secret(name), name


def test_what_is_written_down_has_no_secret():
    critic = Namespace(wandb_key="k3y", lr=1.0)
    args = Namespace(wandb_key="k3y", job_secret="s", input_key="prompt", critic_args=critic, sglang_api_key=None)
    shown = redacted(args)
    assert "k3y" not in str(shown) and shown["job_secret"] == shown["critic_args"].wandb_key == REDACTED
    assert (shown["input_key"], shown["sglang_api_key"], shown["critic_args"].lr) == ("prompt", None, 1.0)
    assert args.wandb_key == critic.wandb_key == "k3y"


def test_a_command_line_is_shown_without_its_secrets():
    words = ["train.py", "--wandb-key", "k3y", "--lr", "1", "--router-api-key=k3y", "--use-wandb"]
    assert redacted_words(words) == ["train.py", "--wandb-key", REDACTED, "--lr", "1", f"--router-api-key={REDACTED}", "--use-wandb"]  # fmt: skip  # noqa: E501


def test_a_text_is_shown_without_the_secrets_in_its_json():
    text = '{"GITHUB_TOKEN": "t0k", "LANG": "C"} from http://me:t0k@host'
    assert without_credentials(text) == f'{{"GITHUB_TOKEN": "{REDACTED}", "LANG": "C"}} from http://{REDACTED}@host'


def test_keys_inside_of_a_map_are_secrets_too():
    text = '{"WANDB_API_KEY": "k3y", "my_secret":  3, "NCCL_DEBUG": "INFO", "input_key": "a\\"b"}'
    args = Namespace(train_env_vars=json.loads(text), critic_args=Namespace(train_env_vars=json.loads(text)))
    shown = redacted(args)
    hidden = {"WANDB_API_KEY": REDACTED, "my_secret": REDACTED, "NCCL_DEBUG": "INFO", "input_key": 'a"b'}
    assert shown["train_env_vars"] == shown["critic_args"].train_env_vars == hidden
    assert args.train_env_vars == json.loads(text)
    flag, word = redacted_words(["--train-env-vars", text])
    assert (flag, json.loads(word)) == ("--train-env-vars", hidden)
    assert json.loads(redacted_words([f"--train-env-vars={text}"])[0].partition("=")[2]) == hidden


def test_a_key_of_wandb_on_the_command_line_is_advised_against(caplog, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    args = Namespace(wandb_key=None, wandb_key_file=None, prometheus_port=None)
    derive_observability(args)
    assert args.wandb_key is None and caplog.text == ""
    args.wandb_key = "k3y"
    derive_observability(args)
    assert "--wandb-key-file" in caplog.text and "k3y" not in caplog.text
