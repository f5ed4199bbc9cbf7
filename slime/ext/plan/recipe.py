"""The command that a launch script submits, read by running the script where it can do nothing.

What a script calls is handled in one of two ways: tools in ``HARMLESS``, and Python with ``-c`` or an inline text, are
run; anything else is only recorded.  Isolation (``slime.isolation.view``) contains what bypasses PATH: absolute paths,
``kill``, redirections.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime.isolation.view import IsolationError, isolated_command, view_of_everything
from slime.utils import env
from slime.utils.errors import ConfigError

TIMEOUT_S = 120
PRETENDED_GPUS = 8
"""Answer to a script that counts the GPUs of its machine."""

HARMLESS = (
    *("awk", "basename", "bash", "cat", "comm", "cut", "date", "dirname", "env", "expr", "false", "grep", "egrep"),
    *("head", "hostname", "id", "join", "jq", "ls", "mktemp", "nl", "nproc", "paste", "printf", "pwd", "readlink"),
    *("realpath", "rev", "sed", "seq", "sh", "sort", "stat", "tail", "tee", "test", "tr", "true", "uname", "uniq"),
    *("wc", "which", "whoami", "xargs"),
)
"""Tools that a script may use on its way to its flags."""
RECORDED = (
    *("pkill", "killall", "kill", "sleep", "pip", "pip3", "uv", "conda", "apt", "apt-get", "git", "make", "sudo"),
    *("su", "curl", "wget", "hf", "huggingface-cli", "modelscope", "aws", "gsutil", "docker", "ssh", "scp", "rsync"),
    *("pdsh", "mpirun", "srun", "sbatch", "scancel", "torchrun", "accelerate", "deepspeed", "nohup", "setsid", "tmux"),
    *("screen", "timeout", "rm", "rmdir", "mv", "cp", "ln", "mkdir", "touch", "chmod", "chown", "truncate", "dd"),
    *("mount", "umount", "ulimit", "sysctl", "systemctl", "service", "reboot", "shutdown", "fuser", "lsof", "nsys"),
    *("tar", "unzip", "numactl", "taskset", "ip", "ifconfig", "ping", "nc", "wandb"),
)
"""Commands that are written down; so is every one that no list names.  Functions of the shell, so that they come
before its builtins, and before folders that a script puts in front of PATH."""

_RAY = r"""
if [[ "$1 $2" == "job submit" ]]; then printf '%s\0' "$@" >"$SLIME_PLAN_RECORD"; else {record}; fi
"""
_PYTHON = r"""
for word in "$@"; do
    case "$word" in
        -c | -) exec {python} "$@" ;;
        train.py | */train.py | train_async.py | */train_async.py)
            printf '%s\0' job submit -- python3 "$@" >"$SLIME_PLAN_RECORD"
            exit 0
            ;;
        -m | *.py) {record}; exit 0 ;;
    esac
done
exec {python} "$@"
"""
_NVIDIA_SMI = 'for ((i = 0; i < SLIME_PLAN_GPUS; i++)); do echo "GPU $i: planned"; done'
_RECORD = r"""{ IFS=" "; line="${0##*/} $*"; echo "${line//$'\n'/ }"; } >>"$SLIME_PLAN_CALLS" """


@dataclass(frozen=True, slots=True)
class Recipe:
    """A command that a script submits."""

    words: list[str]
    """The arguments of train.py or train_async.py."""
    environment: dict[str, str] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    """Other commands of the script, and those that were not run, in order."""


def read_recipe(script: str, more: Sequence[str], folder: Path, *, is_trusted: bool = False) -> Recipe:
    """Run ``script`` as far as its ``ray job submit``, which is written down instead of done.

    Args:
        script: a file like those of scripts/run-*.sh.
        folder: takes the temporary files that the script writes; the words may name one (an --sglang-config).
        is_trusted: run it even where no namespace holds it; recorders stand for commands all the same.
    """
    if not Path(script).is_file():
        raise ConfigError(f"{script} does not exist; give a recipe (scripts/run-*.sh) or the arguments of train.py.")
    tools = folder / "tools"
    record, calls = folder / "submitted", folder / "calls"
    for left in (record, calls):
        left.unlink(missing_ok=True)
    _write_tools(tools)
    variables = {
        "SLIME_SCRIPT_EXTERNAL_RAY": "1",
        "SLIME_PLAN_RECORD": str(record),
        "SLIME_PLAN_CALLS": str(calls),
        "SLIME_PLAN_GPUS": str(PRETENDED_GPUS),
        "PATH": str(tools),
        "BASH_ENV": str(tools / ".functions"),
        "TMPDIR": str(folder),
        "BASE_DIR": env.get_str("BASE_DIR", "/base") or "/base",
        "MASTER_ADDR": env.get_str("MASTER_ADDR", "10.0.0.1") or "10.0.0.1",
    }
    # Functions of the caller's shell would stand for commands.
    inherited = {name: value for name, value in env.copy().items() if not name.startswith("BASH_FUNC_")}
    command = [_bash(), str(Path(script).resolve()), *more]
    try:
        held = isolated_command(view_of_everything(str(folder)))
    except IsolationError as error:
        if not is_trusted:
            raise ConfigError(
                f"{script} was not run: nothing here would hold it back from other processes and files "
                f"({error.reason}). Run it as root, in a container with CAP_SYS_ADMIN, or where "
                "users may make namespaces; give the arguments of train.py instead; or say --trust-script when you "
                "know what it does."
            ) from error
        held = []
    done = _run([*held, *command], inherited | variables, script)
    written = calls.read_text().splitlines() if calls.is_file() else []
    if not record.is_file():
        raise ConfigError(
            f"{script} ended with {done.returncode} before it submitted a job: "
            f"{done.stderr.strip()[-500:] or 'it printed nothing'}. Correct it, or give the arguments of train.py."
        )
    return _submitted(record.read_text().split("\0")[:-1], written, script)


def _run(command: list[str], environment: dict[str, str], script: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            timeout=TIMEOUT_S, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{script} submitted no job within {TIMEOUT_S} s; correct it, or give the arguments of train.py."
        ) from error


def _bash() -> str:
    path = shutil.which("bash")
    if path is None:
        raise ConfigError("bash is not on PATH; scripts cannot be read without it. Give the arguments of train.py.")
    return path


def _write_tools(folder: Path) -> None:
    """Fill the folder that is the script's PATH: links to harmless tools, and recorders."""
    folder.mkdir(exist_ok=True)
    for name in HARMLESS:
        if (path := shutil.which(name)) is not None and not (folder / name).exists():
            (folder / name).symlink_to(path)
    recorders = {name: _RECORD for name in RECORDED}
    python = _PYTHON.format(python=shlex.quote(sys.executable), record=_RECORD)
    recorders |= {"python": python, "python3": python, "nvidia-smi": _NVIDIA_SMI, "ray": _RAY.format(record=_RECORD)}
    for name, text in recorders.items():
        (folder / name).write_text(f"#!{_bash()} -p\n{text}\n")
        (folder / name).chmod(0o755)
    functions = [f'{name}() {{ {shlex.quote(str(folder / name))} "$@"; }}' for name in recorders]
    functions.append("command_not_found_handle() { " + _RECORD.replace("${0##*/} ", "") + "; }")
    (folder / ".functions").write_text("\n".join(functions) + "\n")


def _submitted(words: list[str], calls: list[str], script: str) -> Recipe:
    if "--" not in words or not any(word.endswith(".py") for word in words[words.index("--") :]):
        raise ConfigError(
            f"{script} submits {shlex.join(words)[:200]!r}, without `-- python3 train.py ...`; give the arguments of "
            "train.py instead."
        )
    behind = words.index("--") + 1
    job = words[behind:]
    environment: dict[str, str] = {}
    for position, word in enumerate(words[: behind - 1]):
        name, equals, value = word.partition("=")
        if name == "--runtime-env-json":
            text = value if equals else words[position + 1]
            try:
                environment = dict(json.loads(text).get("env_vars") or {})
            except (ValueError, AttributeError, TypeError) as error:
                raise ConfigError(
                    f"{script}: --runtime-env-json must be a JSON object, as its env_vars must ({error}): {text[:200]}"
                ) from error
    start = next(index for index, word in enumerate(job) if word.endswith(".py")) + 1
    return Recipe(job[start:], environment, calls)
