"""The origin of the job's secret."""

from __future__ import annotations

import logging
import stat
import threading
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor

import pytest

from slime.flags.security import (
    Trust,
    check_security,
    derive_job_secret,
)
from slime.utils.errors import ConfigError


def flags(**given) -> Namespace:
    return Namespace(**{"job_secret_file": None, "no_job_secret": False} | given)


def derived(**given) -> str | None:
    args = flags(**given)
    derive_job_secret(args)
    return Trust.of(args).job_secret


def test_every_job_has_a_secret_of_its_own_and_namespaces_without_one_have_none():
    first, second = derived(), derived()
    assert first and second and first != second and len(first) >= 40
    assert Trust.of(Namespace()).job_secret is None


@pytest.mark.parametrize("flag", ["sglang_api_key", "sglang_admin_api_key", "router_api_key"])
def test_a_key_of_the_command_line_is_the_jobs_secret(flag):
    assert derived(**{flag: "mine"}) == "mine"


def test_no_job_secret_turns_it_off_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert derived(no_job_secret=True) is None
    assert "run code in its engines" in caplog.text


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
    assert len(list(tmp_path.iterdir())) == 200  # no temporary files remain


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
