"""Isolation of programs: escapes fail, excessive use is ended, and leftover processes die."""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import subprocess
import sys
import time
import uuid
from argparse import Namespace
from pathlib import Path

import psutil
import pytest

from slime.agent.sandbox import LocalSandbox, SandboxError, check_local_sandbox
from slime.agent.sandbox import runner as runner_module
from slime.agent.sandbox.runner import IsolatedRunner, Limits
from slime.isolation import view
from slime.utils.errors import ConfigError
from tests.contracts.source_tree import REPO
from tests.eventually import until, wait_until
from tests.ext.agent.escapes import ESCAPES, KERNEL_ESCAPES, STRICT_ESCAPES, program

LATE = ("a child of a child", "a session of its own")
"""They try it a second later."""
SMALL = Limits(memory_mib=256, disk_mib=16, processes=24, cpu_s=20, output_bytes=100_000)


@pytest.fixture
def host(tmp_path):
    """The targets: files, sockets, a process with a variable."""
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    abstract = f"slime-{uuid.uuid4().hex}"
    victim = subprocess.Popen(["sleep", "300"], env={"KEY": "hunter2"})
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as hidden,
    ):
        udp.bind(("127.0.0.1", 0))
        udp.setblocking(False)
        unix.bind(str(tmp_path / "socket"))
        hidden.bind(f"\0{abstract}")
        for listening in (unix, hidden):
            listening.listen()
        yield {
            "secret": str(secret),
            "mark": str(tmp_path / "mark"),
            "project": str(REPO / "pyproject.toml"),
            "port": server.getsockname()[1],
            "udp_port": udp.getsockname()[1],
            "udp": udp,
            "socket": str(tmp_path / "socket"),
            "abstract": abstract,
            "victim": victim.pid,
            "process": victim,
            "name": f"slime_{uuid.uuid4().hex}",
            "add_key": {"x86_64": 248, "aarch64": 217}[platform.machine()],
            "clone": {"x86_64": 56, "aarch64": 220}[platform.machine()],
        }
    victim.kill()
    victim.wait(10)


def marks(host, output):
    """What an attempt reached."""
    found = ["it said so"] if "ESCAPED" in output else []
    if Path(host["mark"]).exists():
        found.append("a file")
    try:
        found.append(f"a datagram {host['udp'].recv(10)!r}")
    except BlockingIOError:
        pass
    if host["process"].poll() is not None:
        found.append("a killed process")
    if Path(os.__file__).with_name(f"{host['name']}.py").exists():
        found.append("a module")
    return found


async def attempt(name, host, *, only_python, is_unsafe=False):
    text = (ESCAPES | KERNEL_ESCAPES | STRICT_ESCAPES)[name]
    async with IsolatedRunner(SMALL, is_unsafe=is_unsafe) as isolated:
        argv = None if only_python else [sys.executable, "-I", "-S", "-"]
        ended = await isolated.run(argv, stdin=program(text, host).encode(), timeout_s=30)
        if is_unsafe and name in LATE:
            await asyncio.sleep(1.5)
    return (ended.out + ended.err).decode()


@pytest.mark.parametrize("name", [*ESCAPES, *KERNEL_ESCAPES])
def test_a_program_does_not_escape(host, name):
    output = asyncio.run(attempt(name, host, only_python=False))
    if name in LATE:
        time.sleep(1.5)
    assert marks(host, output) == [], output


@pytest.mark.parametrize("name", [*ESCAPES, *KERNEL_ESCAPES, *STRICT_ESCAPES])
def test_python_alone_does_not_escape(host, name):
    output = asyncio.run(attempt(name, host, only_python=True))
    assert marks(host, output) == [], output


def test_an_ordinary_user_isolates_too(host):
    """As root, a user namespace simulates another user; everything else is that user's own."""
    code = f"""
import asyncio, os, sys
from slime.agent.sandbox.runner import IsolatedRunner
from tests.ext.agent.test_isolation import SMALL
from tests.ext.agent.escapes import ESCAPES, KERNEL_ESCAPES, program

assert os.getuid() != 0
facts = { ({key: value for key, value in host.items() if isinstance(value, str | int)})!r}

async def play():
    async with IsolatedRunner(SMALL) as isolated:
        for name, text in (ESCAPES | KERNEL_ESCAPES).items():
            source = program(text, facts).encode()
            ended = await isolated.run([sys.executable, "-I", "-S", "-"], stdin=source, timeout_s=30)
            print(name, ended.out)
        print("done")

asyncio.run(play())
"""
    other = ["unshare", "--user", "--map-user=1000", "--map-group=1000"] if os.getuid() == 0 else []
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [*other, sys.executable, "-c", code], cwd=REPO, env=environment, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.stdout.endswith("done\n"), done.stderr[-2000:]
    assert marks(host, done.stdout) == [], done.stdout


async def bash(isolated, cmd, timeout_s=30.0):
    return await isolated.run(["bash", "-c", cmd], timeout_s=timeout_s, env={"PATH": "/usr/bin:/bin"})


def processes_with(word):
    return [one.pid for one in psutil.process_iter(["cmdline"]) if word in " ".join(one.info["cmdline"] or ())]


def test_nothing_outlives_the_runner():
    word = f"{300 + uuid.uuid4().int % 10**9}.5"

    async def play():
        async with IsolatedRunner(SMALL) as isolated:
            await bash(isolated, f"setsid nohup sleep {word} > /dev/null 2>&1 & (sleep {word} & disown) ; sleep 0.1")
            await until(lambda: len(processes_with(f"sleep {word}")) == 2, "two sleepers")
            with pytest.raises(TimeoutError):
                await bash(isolated, f"setsid sleep 9{word} & (setsid sleep 9{word} &) ; sleep 60", timeout_s=0.5)
            assert processes_with(f"sleep 9{word}") == []
            assert len(processes_with(f"sleep {word}")) == 2

    asyncio.run(play())
    assert processes_with(word) == []


def test_the_runner_ends_with_the_process_that_owns_it(tmp_path):
    word = f"{300 + uuid.uuid4().int % 10**9}.5"
    code = f"""
import asyncio
from slime.agent.sandbox.runner import IsolatedRunner
async def play():
    async with IsolatedRunner() as isolated:
        await isolated.run(["/bin/sh", "-c", "setsid sleep {word} & echo"], timeout_s=30)
        print("started", flush=True)
        await asyncio.sleep(60)
asyncio.run(play())
"""
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=REPO, stdout=subprocess.PIPE)
    assert owner.stdout.readline() == b"started\n" and processes_with(f"sleep {word}")
    owner.kill()
    owner.wait(60)
    owner.stdout.close()
    wait_until(lambda: not processes_with(word), "the end of what it started")


@pytest.mark.parametrize(
    ("cmd", "reason"),
    [
        ("exec python3 -c 'x = bytearray(10**9)'", "256 MiB of memory"),
        (
            "for i in 1 2 3 4; do python3 -c 'x = bytearray(120 << 20); import time; time.sleep(20)' & done; wait",
            "256 MiB",
        ),
        ("yes", "100000 bytes of output"),
        ("yes >&2", "100000 bytes of output"),
        ("f() { f | f & }; f; sleep 4; exit 1", "24 processes"),
    ],
)
def test_a_bomb_is_ended(cmd, reason):
    async def play():
        began = time.monotonic()
        async with IsolatedRunner(SMALL) as isolated:
            ended = await bash(isolated, cmd)
            assert len(ended.out) <= 100_000 and len(ended.err) <= 100_000
        assert time.monotonic() - began < 25
        return ended

    ended = asyncio.run(play())
    refused = b"Resource temporarily unavailable" in ended.err  # by the kernel, before the limit was reached
    reasons = ("processes", "memory") if "processes" in reason else (reason,)  # many processes also use much memory
    assert any(one in ended.reason for one in reasons) or ("processes" in reason and refused), ended


def test_a_file_is_written_where_the_sandbox_is(tmp_path):
    """A link that the sandbox creates leads to its own files."""

    async def play():
        async with LocalSandbox(limits=SMALL) as box:
            (tmp_path / "secret").write_text("hunter2")
            await box.exec(f"ln -s {tmp_path}/mark link; ln -s {tmp_path}/secret secret", check=True)
            with pytest.raises(SandboxError, match="link cannot be written"):
                await box.write_file("link", "text")
            assert await box.read_file("secret") == ""
            await box.write_file("big", "x" * 50_000)
            assert len(await box.read_file("big")) == 50_000

    asyncio.run(play())
    assert not (tmp_path / "mark").exists()


def test_a_program_reaches_the_one_address_it_is_given():
    async def answer(reader, writer):
        writer.write((await reader.readline()).upper())
        await writer.drain()
        writer.close()

    async def play():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            url = f"http://localhost:{port}"
            async with IsolatedRunner(SMALL, reach=url) as isolated:
                assert LocalSandbox(reach=url).address_of(url) == f"http://127.0.0.1:{port}"
                assert LocalSandbox(reach=url, is_unsafe=True).address_of(url) == url
                ask = f"exec 3<>/dev/tcp/127.0.0.1/{port}; echo hello >&3; cat <&3; echo > /dev/tcp/127.0.0.1/22"
                return await bash(isolated, ask)

    ended = asyncio.run(play())
    assert ended.out == b"HELLO\n" and b"refused" in ended.err


def test_a_connection_to_an_address_that_does_not_answer_is_closed(monkeypatch):
    monkeypatch.setattr(runner_module, "CONNECT_TIMEOUT_S", 0.3)

    async def play(port):
        async with IsolatedRunner(SMALL, reach=f"http://localhost:{port}") as isolated:
            return await bash(isolated, f"exec 3<>/dev/tcp/127.0.0.1/{port}; cat <&3; echo closed")

    with socket.socket() as deaf:  # bound but not listening: connections are refused
        deaf.bind(("127.0.0.1", 0))
        assert asyncio.run(play(deaf.getsockname()[1])).out == b"closed\n"

    async def never(host, port):
        await asyncio.sleep(60)

    monkeypatch.setattr(runner_module.asyncio, "open_connection", never)
    assert asyncio.run(play(9999)).out == b"closed\n"


def test_where_nothing_isolates_it_does_not_start(monkeypatch):
    view.check_isolation.cache_clear()
    monkeypatch.setattr(view, "_python", lambda: ["/bin/sh", "-c", "echo unshare: no >&2; exit 125", "x"])

    async def enter():
        async with LocalSandbox():
            pass

    try:
        with pytest.raises(ConfigError, match=r"unshare: no.*namespaces.*--unsafe-local-sandbox"):
            asyncio.run(enter())
        with pytest.raises(ConfigError, match="--unsafe-local-sandbox"):
            check_local_sandbox(Namespace(unsafe_local_sandbox=False))
        check_local_sandbox(Namespace(unsafe_local_sandbox=True))
    finally:
        view.check_isolation.cache_clear()


def test_without_isolation_processes_still_end(tmp_path):
    word = f"{300 + uuid.uuid4().int % 10**9}.5"

    async def play():
        async with LocalSandbox(is_unsafe=True) as box:
            assert (await box.exec(f"setsid nohup sleep {word} > /dev/null 2>&1 & pwd")).out.strip() == str(box.folder)
            await until(lambda: processes_with(f"sleep {word}"), "the shell's child becomes it")
            return box.folder

    folder = asyncio.run(play())
    assert processes_with(word) == [] and not folder.exists()
