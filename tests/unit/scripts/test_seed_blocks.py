"""The documents' command blocks, typed verbatim: programs in them are recorded, then run with their arguments."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from ray.dashboard.modules.job.cli import submit
from torch.distributed.run import get_args_parser

from slime.compose import flag_groups, parse_flags
from slime.flags.parse import build_parser
from slime.flags.words import refuse_unknown
from tests.contracts.source_tree import REPO
from tests.unit.scripts import seed_blocks
from tests.unit.scripts.seed_blocks import BLOCKS, CONVERSIONS, TYPING_ERRORS
from tools import convert_hf_to_fp8, fp8_cast_bf16

PROGRAMS = ("torchrun", "python", "pip", "ssh", "hf", "huggingface-cli", "git", "bash", "ray")
ENVIRONMENT = {"BASE_DIR": "/base", "MASTER_ADDR": "10.0.0.1", "NODE_RANK": "1", "WORKER_IP": "10.0.0.2"}


def typed(block: str, tmp_path: Path, **variables: str) -> list[list[str]]:
    """The programs that the shell runs in the checkout when ``block`` is typed, with their arguments."""
    record = tmp_path / "record"
    # Background programs record at the same time, and bash writes line by line.
    write = f"""flock 9; printf '%s\\0' "${{FUNCNAME[0]}}" "$@" $'\\n' >>"{record}" """
    recorders = "\n".join(f'{name}() {{ ( {write}) 9>>"{record}.lock"; }}' for name in PROGRAMS)
    # The documents assume /root, or a folder beside the checkout; here it is elsewhere.
    program = f'cd() {{ builtin cd "{REPO}"; }}\ncd\nSCRIPT_DIR="{REPO}/scripts"\n{recorders}\n{block}'
    environment = dict(os.environ) | ENVIRONMENT | variables
    subprocess.run(["/bin/bash", "-c", program], env=environment, check=True, timeout=60, capture_output=True)
    calls = record.read_text().split("\n\0") if record.exists() else []
    return [call.split("\0")[:-1] for call in calls if call]


def bash_takes(text: str) -> bool:
    return subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, timeout=20).returncode == 0


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_a_shell_script(name):
    assert bash_takes(BLOCKS[name])


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_is_taken_by_torchrun_and_by_the_tool(name, tmp_path):
    block, nodes, processes = CONVERSIONS[name]
    calls = typed(block, tmp_path)
    if "pip install" in block:
        assert calls.pop(0) == ["pip", "install", "-e", ".", "--no-deps"]
    [call] = calls
    if call[0] == "torchrun":
        launch = get_args_parser().parse_args(call[1:])
        assert (int(launch.nnodes.split(":")[-1]), int(launch.nproc_per_node)) == (nodes, processes)
        assert launch.training_script == "tools/convert_hf_to_torch_dist.py"
        if nodes > 1:
            assert (launch.master_addr, launch.master_port, launch.node_rank) == ("10.0.0.1", 12345, 1)
        words = launch.training_script_args
    else:
        assert call[:2] == ["python", "tools/convert_hf_to_torch_dist.py"]
        words = call[2:]
    parser = build_parser(with_engine_flags=False, groups=flag_groups())
    args, leftover = parser.parse_known_args(words)
    refuse_unknown(parser, words, leftover)
    assert args.hf_checkpoint and args.save and args.num_layers


def test_quantization_tools_take_their_lines(tmp_path):
    [fp8] = typed(seed_blocks.FP8, tmp_path)
    options = convert_hf_to_fp8.build_parser().parse_args(fp8[2:])
    assert (options.strategy, options.block_size, options.max_workers) == ("block", [128, 128], 4)
    (tmp_path / "record").unlink()
    [bf16] = typed(seed_blocks.BF16, tmp_path)
    options = fp8_cast_bf16.build_parser().parse_args(bf16[2:])
    assert options.output_bf16_hf_path == "/base/DeepSeek-R1-bf16/"


@pytest.mark.parametrize("block", ["separate", "shared"])
def test_a_submitted_job_is_taken_by_ray_and_by_slime(block, tmp_path):
    # Three dots stand for flags from earlier in the document.
    runtime_env = '--address="http://127.0.0.1:8265" --runtime-env-json=\'{"env_vars": {"A": "1"}}\''
    text = BLOCKS[block].replace("submit ...", f"submit {runtime_env}").replace("\\\n   ...", "")
    [call] = typed(text, tmp_path)
    assert call[:3] == ["ray", "job", "submit"]
    entrypoint = submit.make_context("submit", call[3:]).params["entrypoint"]
    assert list(entrypoint[:2]) == ["python3", "train.py"]
    args = parse_flags(list(entrypoint[2:]))
    assert (args.actor_num_gpus_per_node, args.colocate) == ((8, True) if block == "shared" else (4, False))


def test_a_script_extends_the_models_flags(tmp_path):
    block = seed_blocks.EXTEND_MODEL_ARGS + 'python "${MODEL_ARGS[@]}" "${SPEC_ARGS[@]}"\n'
    [call] = typed(block, tmp_path)
    args = parse_flags(call[1:])
    assert (args.num_layers, args.mtp_num_layers, args.enable_mtp_training) == (47, 1, True)
    (tmp_path / "record").unlink()
    extended = TYPING_ERRORS["MODEL_ARGS += ( --rotary-base 10000 )"]
    block = f'source "${{SCRIPT_DIR}}/models/qwen3-4B.sh"\n{extended}\npython ${{MODEL_ARGS[@]}}\n'
    [call] = typed(block, tmp_path)
    assert parse_flags(call[1:]).rotary_base == 10000  # the last value wins


def test_every_script_that_the_documents_run_is_there(tmp_path):
    calls = typed(seed_blocks.RUN_BLOCKS, tmp_path)
    assert len(calls) == 6
    for program, script in calls:
        assert program == "bash" and (REPO / script).is_file()
