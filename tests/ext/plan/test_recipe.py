"""Reading a launch script: returns its command; every other program it calls is recorded or blocked."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from slime.ext.plan import recipe as recipe_module
from slime.ext.plan.recipe import read_recipe
from slime.isolation.view import IsolationError, check_isolation
from slime.utils.errors import ConfigError
from tests.contracts.source_tree import REPO

SUBMIT = (
    'ray job submit --address=http://127.0.0.1:8265 --runtime-env-json=\'{"env_vars": {"A": "1"}}\' '
    "-- python3 train.py --num-rollout 3"
)


def script_of(folder: Path, text: str) -> str:
    file = folder / "launch.sh"
    file.write_text(f"#!/bin/bash\n{text}\n")
    return str(file)


def read(tmp_path: Path, text: str, *more: str, is_trusted: bool = False):
    folder = tmp_path / "private"
    folder.mkdir()
    return read_recipe(script_of(tmp_path, text), more, folder, is_trusted=is_trusted)


def can_hold() -> bool:
    """True if this machine can isolate; otherwise plans refuse scripts, which the next tests check."""
    try:
        check_isolation(keeps_user=True)
    except IsolationError:
        return False
    return True


def test_a_script_that_begins_by_ending_every_python_gives_its_command(tmp_path):
    before = "pkill -9 sglang\nsleep 3000\nray stop --force\npkill -9 python\nkillall ray\nset -ex\npip install x\n"
    after = "ray start --head\nhf download model\nsome-tool of-the-user\ncurl http://127.0.0.1\n"
    recipe = read(tmp_path, before + after + SUBMIT, is_trusted=True)
    assert recipe.words == ["--num-rollout", "3"]
    assert recipe.environment == {"A": "1"}
    assert recipe.calls == [
        "pkill -9 sglang", "sleep 3000", "ray stop --force", "pkill -9 python", "killall ray", "pip install x",
        "ray start --head", "hf download model", "some-tool of-the-user", "curl http://127.0.0.1",
    ]  # fmt: skip


def test_a_script_without_ray_that_starts_train_py_gives_its_command(tmp_path):
    text = 'N=$(python3 -c "print(2 + 3)")\npython3 tools/convert.py --save x\n'
    text += 'python train_async.py --num-rollout $N "$@"'
    recipe = read(tmp_path, text, "--seed", "7", is_trusted=True)
    assert recipe.words == ["--num-rollout", "5", "--seed", "7"]
    assert recipe.calls == ["python3 tools/convert.py --save x"]


def test_a_script_that_submits_nothing_is_an_error_with_what_it_said(tmp_path):
    with pytest.raises(ConfigError, match=r"ended with 3 before it submitted a job: no data"):
        read(tmp_path, "echo no data >&2; exit 3", is_trusted=True)


def refuse(view) -> None:
    raise IsolationError("unshare: not permitted")


def test_where_nothing_can_hold_a_script_it_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe_module, "isolated_command", refuse)
    with pytest.raises(ConfigError, match=r"was not run.*unshare: not permitted.*--trust-script"):
        read(tmp_path, f"echo met > {tmp_path}/met; {SUBMIT}")
    assert not (tmp_path / "met").exists()


def test_a_trusted_script_is_run_where_nothing_holds_it(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe_module, "isolated_command", refuse)
    assert read(tmp_path, SUBMIT, is_trusted=True).words == ["--num-rollout", "3"]


HARM = """
pkill -9 python; killall -9 python; /usr/bin/pkill -9 python; /usr/bin/pkill -9 -f .; command -p pkill -9 -f .
builtin kill -9 -1; builtin kill -9 {victim}; builtin kill -9 $PPID; builtin kill -9 $$
enable kill; unset -f kill pkill; kill -9 -1; kill -9 {victim}
PATH=/usr/bin:/bin pkill -9 -f .; env -i /usr/bin/pkill -9 -f .; xargs -a /dev/null /usr/bin/pkill -9 -f .
(exec /usr/bin/pkill -9 -f .)
python3 -c 'import os; os.kill(-1, 9)'; {python} -c 'import os; os.kill({victim}, 9)'
/usr/bin/unshare -Um /bin/mount -o remount,bind,rw / ; /usr/bin/nsenter -t 1 -a /usr/bin/pkill -9 -f .
/bin/mount -o remount,bind,rw {precious}
/usr/bin/unshare -Um /bin/bash -c '/bin/mount -o remount,bind,rw /; echo gone > {precious}/file'
: > {precious}/file; /bin/rm -rf {precious}; /bin/mv {precious} /tmp/elsewhere; /bin/chmod 000 {precious}
python3 -c 'import shutil; shutil.rmtree("{precious}")'
ls /dev >"$TMPDIR/seen_devices"; cat /proc/[0-9]*/cmdline >"$TMPDIR/seen_processes"
(echo > /dev/tcp/127.0.0.1/{port}) && echo reached >"$TMPDIR/seen_network"
"""

WATCHED = """
import pathlib, socket, subprocess, sys
from slime.ext.plan.recipe import read_recipe

folder, script = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
server = socket.create_server(("127.0.0.1", 0))
text = script.read_text()
text = text.replace("{victim}", str(victim.pid)).replace("{port}", str(server.getsockname()[1]))
script.write_text(text)
recipe = read_recipe(str(script), [], folder)
print(recipe.words, "victim", "lives" if victim.poll() is None else "is dead")
victim.kill()
"""


def test_the_most_harmful_script_harms_nobody(tmp_path):
    """Runs in separate namespaces: a broken sandbox would only harm these processes and one folder."""
    outer, inner, precious = tmp_path / "outer", tmp_path / "outer/inner", tmp_path / "outer/precious"
    inner.mkdir(parents=True)
    precious.mkdir()
    (precious / "file").write_text("kept")
    if not can_hold():
        with pytest.raises(ConfigError, match="was not run"):
            read(tmp_path, SUBMIT)
        return
    script = outer / "harm.sh"
    harm = HARM.replace("{precious}", str(precious)).replace("{python}", shlex.quote(sys.executable))
    script.write_text(f"#!/bin/bash\n{harm}\n{SUBMIT}\n")
    bash = f"{shlex.join([sys.executable, '-c', WATCHED, str(inner), str(script)])}"
    command = ["unshare", "-Urpfmn", "--mount-proc", "--kill-child", "bash", "-c", f"ip link set lo up; {bash}"]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=200)
    assert done.stdout.split("\n")[0] == "['--num-rollout', '3'] victim lives", done.stderr[-2000:]
    assert (precious / "file").read_text() == "kept" and stat.S_IMODE(precious.stat().st_mode) != 0
    assert "zero" in (inner / "seen_devices").read_text() and "tty" not in (inner / "seen_devices").read_text()
    assert "time.sleep" not in (inner / "seen_processes").read_text()
    assert not (inner / "seen_network").exists()
