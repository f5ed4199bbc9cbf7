"""Recipes as Python scripts: download, convert, train.  Imported as ``U`` by end-to-end scripts.

These functions run the tools and ``scripts/lib.sh``, as the recipes under ``scripts/`` do: each job gets a Ray cluster
that ends with the job; nothing else on the machine is stopped.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import random
import shlex
import tempfile
import time
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slime.utils import env
from slime.utils.errors import ConfigError
from slime.utils.files import user_folder
from slime.utils.misc import exec_command

__all__ = [
    "NUM_GPUS_OF_HARDWARE",
    "ExecuteTrainConfig",
    "check_has_nvlink",
    "convert_checkpoint",
    "create_run_id",
    "dataclass_cli",
    "exec_command",
    "execute_train",
    "fp8_cast_bf16",
    "get_bool_env_var",
    "get_default_wandb_args",
    "get_env_enable_infinite_run",
    "hf_download_dataset",
    "repo_base_dir",
    "rsync_simple",
    "save_to_temp_file",
]

repo_base_dir = Path(__file__).resolve().parents[3]

NUM_GPUS_OF_HARDWARE = {"H100": 8, "H200": 8, "B200": 8, "GB200": 4, "GB300": 4}
"""GPUs of one node."""

DATASET_DIR = "/root/datasets"


@dataclasses.dataclass
class ExecuteTrainConfig:
    """Options that every script offers in addition to its own."""

    cuda_core_dump: bool = False
    """Write a core dump on a GPU fault."""
    num_nodes: int = dataclasses.field(default_factory=lambda: env.get_int("SLIME_SCRIPT_NUM_NODES", 1))
    extra_env_vars: str = ""
    """``NAME=value`` words, separated by spaces; they override the script's environment variables."""


# Preparations


def convert_checkpoint(
    model_name: str,
    megatron_model_type: str,
    num_gpus_per_node: int,
    multinode: bool = False,
    extra_args: str = "",
    dir_dst: str = "/root",
    hf_checkpoint: str | None = None,
) -> None:
    """Convert ``/root/models/MODEL_NAME`` to ``DIR_DST/MODEL_NAME_torch_dist``, unless that exists.

    Args:
        megatron_model_type: name of the file in ``scripts/models`` that describes the model.
        multinode: run as one of several nodes, configured by ``SLURM_JOB_NUM_NODES`` or ``SLIME_SCRIPT_NUM_NODES``,
            ``SLURM_NODEID``, ``MASTER_ADDR`` and ``MASTER_PORT``.
    """
    target = Path(dir_dst) / f"{model_name}_torch_dist"
    if (target / "latest_checkpointed_iteration.txt").exists():
        print(f"{target} exists already")
        return
    source = hf_checkpoint or f"/root/models/{model_name}"
    launcher = f"torchrun --nproc-per-node {num_gpus_per_node}"
    if multinode:
        num_nodes = env.get_int("SLURM_JOB_NUM_NODES", env.get_int("SLIME_SCRIPT_NUM_NODES", 1))
        launcher += (
            f" --nnodes {num_nodes} --node-rank {env.get_int('SLURM_NODEID', 0)}"
            f" --master-addr {shlex.quote(env.get_str('MASTER_ADDR', '127.0.0.1') or '')}"
            f" --master-port {env.get_int('MASTER_PORT', 23456)}"
        )
    exec_command(
        f"{_enter(megatron_model_type)} && "
        f'{launcher} tools/convert_hf_to_torch_dist.py "${{MODEL_ARGS[@]}}" '
        f"--hf-checkpoint {shlex.quote(source)} --save {shlex.quote(str(target))} {extra_args}".rstrip()
    )


def hf_download_dataset(full_name: str) -> None:
    """Download the data set ``owner/name`` from the Hugging Face hub to ``/root/datasets/name``."""
    folder = f"{DATASET_DIR}/{full_name.rpartition('/')[2]}"
    exec_command(f"hf download --repo-type dataset {shlex.quote(full_name)} --local-dir {shlex.quote(folder)}")


def rsync_simple(src: str, dst: str) -> None:
    """Copy the content of the folder ``src`` into the folder ``dst``."""
    exec_command(f"mkdir -p {shlex.quote(dst)} && rsync -a --info=progress2 {shlex.quote(src)}/ {shlex.quote(dst)}")


def fp8_cast_bf16(src: str, dst: str) -> None:
    """Write a bf16 copy of a block-FP8 model, unless it exists."""
    if (Path(dst) / "model.safetensors.index.json").exists():
        print(f"{dst} exists already")
        return
    tool = shlex.quote(str(repo_base_dir / "tools" / "fp8_cast_bf16.py"))
    exec_command(f"python3 {tool} --input-fp8-hf-path {shlex.quote(src)} --output-bf16-hf-path {shlex.quote(dst)}")


# Training


def execute_train(
    train_args: str,
    num_gpus_per_node: int,
    megatron_model_type: str | None,
    train_script: str = "train.py",
    before_ray_job_submit: Callable[[], Any] | None = None,
    extra_env_vars: Mapping[str, str] | None = None,
    config: ExecuteTrainConfig | None = None,
) -> None:
    """Start a Ray cluster, run the job in it, and wait until it ends.

    Args:
        train_args: flags, as written in a shell.
        megatron_model_type: file of ``scripts/models`` whose flags precede ``train_args``; None for no file.
        before_ray_job_submit: called right before the job is submitted, to start services that it needs.
        extra_env_vars: environment variables of all processes of the job.

    Raises:
        subprocess.CalledProcessError: the job failed.
    """
    config = config or ExecuteTrainConfig()
    variables = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_NVLS_ENABLE": str(int(check_has_nvlink())),
        **(_core_dump_variables() if config.cuda_core_dump else {}),
        **(extra_env_vars or {}),
        **_words(config.extra_env_vars),
    }
    model_args = '"${MODEL_ARGS[@]}" ' if megatron_model_type else ""
    start = f"start_ray {num_gpus_per_node}"
    if config.num_nodes > 1:
        start = f"source scripts/nodes.sh && start_nodes {config.num_nodes} {num_gpus_per_node}"
    pairs = " ".join(shlex.quote(f"{name}={value}") for name, value in variables.items())
    if before_ray_job_submit is not None:
        before_ray_job_submit()
    flags = model_args + " ".join(train_args.splitlines()).strip()
    exec_command(
        f"{_enter(megatron_model_type)} && {start} && "
        f'JOB_ENV="$(job_env {pairs})" submit_job {shlex.quote(train_script)} {flags}'
    )


def _core_dump_variables() -> dict[str, str]:
    return {
        "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
        "CUDA_COREDUMP_SHOW_PROGRESS": "1",
        "CUDA_COREDUMP_GENERATION_FLAGS": "skip_nonrelocated_elf_images,skip_global_memory,skip_shared_memory,"
        "skip_local_memory,skip_constbank_memory",
        "CUDA_COREDUMP_FILE": f"{user_folder()}/cuda_coredump_%h.%p.%t",
    }


def _enter(megatron_model_type: str | None) -> str:
    """Return shell text that defines the recipes' functions, and ``MODEL_ARGS`` if a model is given."""
    words = f"source {shlex.quote(str(repo_base_dir / 'scripts' / 'lib.sh'))}"
    if megatron_model_type is None:
        return words
    model = repo_base_dir / "scripts" / "models" / f"{megatron_model_type}.sh"
    if not model.is_file():
        known = ", ".join(sorted(path.stem for path in model.parent.glob("*.sh")))
        raise ConfigError(f"There is no scripts/models/{megatron_model_type}.sh; megatron_model_type can be {known}.")
    return f"{words} && source {shlex.quote(str(model))}"


def _words(text: str) -> dict[str, str]:
    pairs = {}
    for word in shlex.split(text):
        name, sign, value = word.partition("=")
        if not sign:
            raise ConfigError(f"extra_env_vars has {word!r}; write NAME=value, with spaces between them.")
        pairs[name] = value
    return pairs


def get_default_wandb_args(test_file: str, run_name_prefix: str | None = None, run_id: str | None = None) -> str:
    """Return flags that log to Weights & Biases; empty text without ``WANDB_API_KEY``."""
    if env.get_str("WANDB_API_KEY") is None:
        print("get_default_wandb_args: WANDB_API_KEY is not set; nothing is logged to Weights & Biases")
        return ""
    prefix = f"{run_name_prefix}_" if run_name_prefix else ""
    group = f"{prefix}{run_id or create_run_id()}"
    # The key itself stays in the environment: every user of the machine can read command lines.
    return (
        f"--use-wandb --wandb-project slime-{shlex.quote(Path(test_file).stem)} --wandb-group {shlex.quote(group)} "
        "--disable-wandb-random-suffix "
    )


# Helpers


def create_run_id() -> str:
    """Return a run name: the time and three digits."""
    return f"{time.strftime('%y%m%d-%H%M%S')}-{random.SystemRandom().randint(0, 999):03d}"


def get_bool_env_var(name: str, default: str = "false") -> bool:
    """Return True if an environment variable is 1, true, yes or on."""
    return env.is_yes(env.get_str(name, default))


def get_env_enable_infinite_run() -> bool:
    """Return ``SLIME_TEST_ENABLE_INFINITE_RUN`` as a bool: True if a test script should run forever."""
    return get_bool_env_var("SLIME_TEST_ENABLE_INFINITE_RUN")


def save_to_temp_file(text: str, ext: str) -> str:
    """Write ``text`` to a new file with the extension ``.EXT``; return its path."""
    with tempfile.NamedTemporaryFile("w", suffix=f".{ext.removeprefix('.')}", delete=False) as file:
        file.write(text)
    return file.name


@functools.cache
def check_has_nvlink() -> bool:
    """Return True if this machine's GPUs are connected by NVLink."""
    links = exec_command("nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9][0-9]*' | wc -l", capture_output=True)
    return int(links or 0) > 0


def dataclass_cli(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of one dataclass so that it takes the dataclass's fields as parameters.

    With ``typer.run(dataclass_cli(main))`` each field becomes a command-line option.
    """
    (parameter,) = inspect.signature(function).parameters.values()
    kind = typing.get_type_hints(function)[parameter.name]
    if not dataclasses.is_dataclass(kind):
        raise ConfigError(f"{function.__name__} must take one dataclass; its parameter is {kind!r}.")
    hints = typing.get_type_hints(kind)

    @functools.wraps(function)
    def call(**fields: Any) -> Any:
        return function(kind(**fields))  # type: ignore[operator]

    parameters = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=_default_of(field), annotation=hints[field.name]
        )
        for field in dataclasses.fields(kind)
        if field.init
    ]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {field.name: field.annotation for field in parameters}
    return call


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return inspect.Parameter.empty if field.default_factory is dataclasses.MISSING else field.default_factory()
