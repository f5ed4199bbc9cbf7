"""Sandboxes: a real local folder, and E2B against a fake of its client."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from slime.agent.sandbox import (
    EXIT_TIME_BUDGET_EXCEEDED,
    DaytonaSandbox,
    E2BSandbox,
    LocalSandbox,
    SandboxError,
    exec_and_wait,
    hosted,
    protocol,
)
from slime.utils.errors import ConfigError
from tests.ext.agent.scripted_daytona import ScriptedDaytona


@pytest.fixture
def daytona(tmp_path, monkeypatch):
    pytest.importorskip("daytona", reason="the extra `daytona` is not installed")
    server = ScriptedDaytona(tmp_path)
    monkeypatch.setenv("DAYTONA_API_URL", f"{server.url}/api")
    monkeypatch.setenv("DAYTONA_API_KEY", "key")
    yield server
    server.stop()


@pytest.fixture(params=["local", "daytona"])
def new_sandbox(request):
    """Creates a sandbox of each kind that can run here; E2B is tested below."""
    if request.param == "local":
        return LocalSandbox
    request.getfixturevalue("daytona")
    return lambda: DaytonaSandbox("debian:12")


def test_commands_and_files_of_a_sandbox(tmp_path, new_sandbox):
    async def play():
        async with new_sandbox() as sb:
            await sb.write_file("deep/file.txt", "text")
            (tmp_path / "source").write_bytes(b"from a path")
            await sb.write_file("copy", tmp_path / "source")
            assert await sb.read_file("deep/file.txt") == "text"
            assert await sb.exec("cat copy; echo $NAME >&2; exit 3", env={"NAME": "x y"}) == (
                3,
                "from a path",
                "x y\n",
            )
            with pytest.raises(SandboxError, match="code 3"):
                await sb.exec("exit 3", check=True)
            with pytest.raises(SandboxError, match="within 0.2 s"):
                await sb.exec("sleep 30", timeout=0.2)
            assert await sb.read_file("nothing") == ""
            done = await exec_and_wait(
                sb, cmd="sleep 0.1; echo $A; exit 5", time_budget_sec=20, tag="t", env={"A": "it's"}, want_output=True
            )
            assert done == (5, "it's\n") and sb.sandbox_id

    asyncio.run(play())


def test_a_folder_is_no_file_and_the_local_sandbox_ends():
    async def play():
        async with LocalSandbox() as sb:
            await sb.exec("mkdir deep", check=True)
            with pytest.raises(SandboxError, match="deep"):
                await sb.read_file("deep")
            return sb.folder

    assert not asyncio.run(play()).exists()


def test_daytona_is_asked_for_a_sandbox_that_ends_and_a_lost_answer_is_asked_for_again(daytona, monkeypatch):
    monkeypatch.setattr(hosted, "RETRY_WAIT_S", 0.0)

    async def play():
        async with DaytonaSandbox("debian:12", timeout=90) as sb:
            daytona.losses = 1
            assert (await sb.exec("true")).code == 0 and len(daytona.commands) == 2
            daytona.losses = 1
            with pytest.raises(SandboxError, match="failed 1 time"):
                await sb.exec("true", idempotent=False)
            daytona.losses = 9
            with pytest.raises(SandboxError, match="failed 4 time"):
                await sb.exec("true")
            daytona.losses = 1
            with pytest.raises(SandboxError):
                await sb.exec("cd $HOME", user="agent", idempotent=False)
            assert daytona.commands[-1]["command"].startswith("su agent -s /bin/bash -c 'cd $HOME' 2> /tmp/")
            daytona.losses = 0
            return sb.sandbox_id

    assert asyncio.run(play()) == daytona.destroyed[-1]
    made = daytona.created[-1]
    assert (made["user"], made["ttlMinutes"], made["autoStopInterval"], made["autoDeleteInterval"]) == (
        "root",
        2,
        0,
        0,
    )
    assert "debian:12" in made["buildInfo"]["dockerfileContent"]
    monkeypatch.delenv("DAYTONA_API_KEY")
    with pytest.raises(ConfigError, match="DAYTONA_API_KEY"):
        asyncio.run(DaytonaSandbox("debian:12").__aenter__())


def test_a_long_job_gives_its_code_and_output_and_ends_at_its_budget():
    async def play():
        async with LocalSandbox() as sb:
            tag = f"test-{sb.sandbox_id}"
            await sb.exec("mkdir work", check=True)
            done = await exec_and_wait(
                sb,
                cmd='echo "$GREETING from $PWD"; sleep 0.3; exit 5',
                time_budget_sec=20,
                tag=tag,
                env={"GREETING": "it's me"},
                workdir=f"{sb.folder}/work",
                want_output=True,
            )
            assert done == (5, f"it's me from {sb.folder}/work\n")
            marker = f"{sb.folder}/still-running"
            late = await exec_and_wait(
                sb, cmd=f"(while true; do touch {marker}; sleep 0.1; done) & wait", time_budget_sec=0.5, tag=tag
            )
            assert late == (EXIT_TIME_BUDGET_EXCEEDED, "")
            await sb.exec(f"rm -f {marker}; sleep 0.4", check=True)
            assert (await sb.exec(f"test -e {marker}")).code == 1  # its children ended with it

    asyncio.run(play())


class LosesTheAnswer(LocalSandbox):
    """Starts a job and loses the connection before or after the command runs."""

    def __init__(self, reached):
        super().__init__()
        self.reached, self.starts = reached, 0

    async def exec(self, cmd, **kwargs):
        if not cmd.startswith("setsid"):
            return await super().exec(cmd, **kwargs)
        self.starts += 1
        assert kwargs["idempotent"] is False
        if self.reached:
            await super().exec(cmd, **kwargs)
        raise SandboxError("the connection broke")


@pytest.mark.parametrize("reached", [True, False])
def test_a_job_is_not_started_again_when_the_answer_is_lost(monkeypatch, reached):
    monkeypatch.setattr(protocol, "SPAWN_CHECK_S", 0.3)

    async def play():
        async with LosesTheAnswer(reached) as sb:
            try:
                done = await exec_and_wait(sb, cmd="echo once >> /tmp/log", time_budget_sec=20, tag="lost")
                return done, await sb.read_file("/tmp/log")
            finally:
                assert sb.starts == 1

    if reached:
        assert asyncio.run(play()) == ((0, ""), "once\n")
    else:
        with pytest.raises(SandboxError, match="connection broke"):
            asyncio.run(play())


class NotFoundException(Exception):
    """Named as in E2B's client."""


class TimeoutException(Exception):
    """Named as in E2B's client."""


class Service:
    """The interface of E2B's client, from its documentation; fails a given number of times."""

    made: list = []

    def __init__(self, options):
        self.options = options
        self.sandbox_id = "box-1"
        self.failures = 0
        self.hangs = False
        self.ran = []
        self.stored = {}
        self.commands = SimpleNamespace(run=self.run)
        self.files = SimpleNamespace(write=self.write, read=self.read)
        self.killed = False

    @classmethod
    async def create(cls, **options):
        cls.made.append(cls(options))
        return cls.made[-1]

    async def run(self, cmd, user, envs, timeout):
        self.ran.append((cmd, user, envs, timeout))
        if self.hangs:
            await asyncio.sleep(60)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("lost")
        if cmd == "sleep":
            raise TimeoutException("deadline exceeded")
        if cmd == "false":
            error = RuntimeError("Command exited with code 1")
            error.exit_code, error.stdout, error.stderr = 1, "", "no"
            raise error
        return SimpleNamespace(exit_code=0, stdout="out", stderr="")

    async def write(self, path, data, user):
        self.stored[path] = data

    async def read(self, path, user):
        if path not in self.stored:
            raise NotFoundException(f"{path} does not exist")
        return self.stored[path]

    async def kill(self):
        self.killed = True


class Box(E2BSandbox):
    """With the client above."""

    @staticmethod
    def _service():
        return Service


def test_e2b_is_asked_as_its_client_wants(monkeypatch):
    monkeypatch.setattr(hosted, "RETRY_WAIT_S", 0.0)

    async def play():
        async with Box("img", timeout=60, image_metadata_key="image", size="big") as sb:
            service = Service.made[-1]
            assert service.options == {"timeout": 60, "metadata": {"size": "big", "image": "img"}}
            assert await sb.exec("true", user="agent", env={"A": "1"}, timeout=5) == (0, "out", "")
            assert service.ran[-1] == ("true", "agent", {"A": "1"}, 5)
            assert await sb.exec("false") == (1, "", "no")
            with pytest.raises(SandboxError, match="code 1"):
                await sb.exec("false", check=True)
            await sb.write_file("/f", "text")
            assert (await sb.read_file("/f"), await sb.read_file("/nothing")) == ("text", "")
            service.failures = 2
            assert (await sb.exec("true")).code == 0
            service.failures = 1
            with pytest.raises(SandboxError, match="failed 1 time"):
                await sb.exec("true", idempotent=False)
            service.failures = 99
            with pytest.raises(SandboxError, match="failed 4 time"):
                await sb.exec("true")
            return service

    service = asyncio.run(play())
    assert service.killed


def test_a_command_that_the_service_does_not_answer_is_left_at_its_deadline_and_repeated_when_it_may_be(monkeypatch):
    monkeypatch.setattr(hosted, "RETRY_WAIT_S", 0.0)
    monkeypatch.setattr(hosted, "RPC_TIMEOUT_S", 0.25)

    async def play():
        async with Box("img", rpc_retries=2) as sb:
            service = Service.made[-1]
            await sb.exec("true")
            assert service.ran.pop()[-1] == 120
            service.hangs = True
            with pytest.raises(SandboxError, match=r"box-1: exec 'true' failed 3 time.*last: TimeoutError"):
                await sb.exec("true", timeout=0.05)
            assert len(service.ran) == 3
            with pytest.raises(SandboxError, match="failed 1 time"):
                await sb.exec("true", timeout=0.05, idempotent=False)
            assert len(service.ran) == 4

    asyncio.run(asyncio.wait_for(play(), 30))


def test_a_missing_package_is_named():
    async def enter():
        async with E2BSandbox("img"):
            pass

    with pytest.raises(ConfigError, match="pip install e2b"):
        asyncio.run(enter())
