"""slime against verl on one GPU: the same model folder, prompts, lengths, batch and optimizer; a table by phase.

    pip install 'verl[sglang]==0.9.1'        # beside slime; see --help for what runs without it
    python benchmarks/peers/run.py --out runs/peers
    python benchmarks/peers/run.py --out /tmp/p --shape tiny --prompts 2 --samples 4 --median 24 --cap 32 \\
        --sides slime --slime=--fp32       # a CPU, only slime

Each side is a whole colocated job, one after the other: GRPO with a KL term against a reference, one optimizer step
per rollout, fp32 master weights, no recomputation, engines with the same attention, memory share and number of
requests.  The model has random weights in the shape of ``--shape``; response lengths are drawn once (log-normal) and
forced.  ``--out`` receives each side's log and metrics, and ``peers.json``, a file of benchmarks/results.  If the
installed versions are not those that verl asks for, the notes say so.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
from packaging.requirements import Requirement  # noqa: E402

from benchmarks import results_page  # noqa: E402
from benchmarks.peers import phases, workload  # noqa: E402

SLIME = """
--actor-num-nodes 1 --actor-num-gpus-per-node 1 --colocate --rollout-num-gpus-per-engine 1
--input-key prompt --label-key label --metadata-key extra_info --apply-chat-template
--custom-generate-function-path benchmarks.peers.slime_hooks.generate
--custom-rm-path benchmarks.peers.slime_hooks.reward
--rollout-temperature 1 --balance-data --use-dynamic-batch-size
--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl --entropy-coef 0
--eps-clip 0.2 --eps-clip-high 0.28 --calculate-per-token-loss
--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
--clip-grad 1 --attention-dropout 0 --hidden-dropout 0 --accumulate-allreduce-grads-in-fp32
--attention-softmax-in-fp32
--ref-load {model} --hf-checkpoint {model} --prompt-data {prompts_file} --num-rollout {steps}
--rollout-batch-size {prompts} --n-samples-per-prompt {samples} --global-batch-size {batch}
--rollout-max-response-len {cap} --max-tokens-per-gpu {tokens}
"""
SLIME_ENGINE = """
--sglang-mem-fraction-static {memory} --sglang-max-running-requests {requests} --sglang-server-concurrency {requests}
--sglang-attention-backend {attention} --sglang-sampling-backend pytorch
"""
VERL = """
algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False
data.train_files={prompts_file} data.val_files={prompts_file} data.train_batch_size={prompts}
data.max_prompt_length=256 data.max_response_length={cap} data.shuffle=False data.filter_overlong_prompts=False
data.return_raw_chat=True data.dataloader_num_workers=0
actor_rollout_ref.model.path={model} actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.model.enable_gradient_checkpointing=False
actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.strategy=fsdp2
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.weight_decay=0.1
actor_rollout_ref.actor.optim.betas=[0.9,0.98]
+actor_rollout_ref.actor.optim.override_optimizer_config.fused=True
actor_rollout_ref.actor.ppo_mini_batch_size={prompts} actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.ppo_max_token_len_per_gpu={tokens}
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28
actor_rollout_ref.actor.fsdp_config.reshard_after_forward=False
actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation=True
actor_rollout_ref.ref.strategy=fsdp2 actor_rollout_ref.ref.fsdp_config.strategy=fsdp2
actor_rollout_ref.ref.fsdp_config.model_dtype=bfloat16
actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True
actor_rollout_ref.ref.log_prob_max_token_len_per_gpu={twice_tokens}
actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={twice_tokens}
actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.mode=async
actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.n={samples} actor_rollout_ref.rollout.temperature=1.0
actor_rollout_ref.rollout.gpu_memory_utilization={memory} actor_rollout_ref.rollout.max_num_seqs={requests}
+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend={attention}
+actor_rollout_ref.rollout.engine_kwargs.sglang.sampling_backend=pytorch
+actor_rollout_ref.rollout.engine_kwargs.sglang.cuda_graph_backend_prefill=disabled
actor_rollout_ref.rollout.agent.default_agent_loop=forced_length
actor_rollout_ref.rollout.agent.agent_loop_config_path={folder}/agent_loop.yaml
reward.custom_reward_function.path={root}/benchmarks/peers/verl_hooks.py
reward.custom_reward_function.name=compute_score
trainer.logger=[console,file] trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=-1
trainer.resume_mode=disable trainer.nnodes=1 trainer.n_gpus_per_node=1 trainer.total_epochs=1000
trainer.total_training_steps={steps} trainer.project_name=peers trainer.experiment_name=verl
trainer.default_local_dir={folder}/checkpoints
"""
AGENT_LOOP = "- name: forced_length\n  _target_: benchmarks.peers.verl_hooks.ForcedLength\n"
QUIET = "ignore::FutureWarning,ignore::UserWarning,ignore::DeprecationWarning"
LOOK_S = 0.1
"""Seconds between two readings of a side's metrics."""
CHILDREN_S = 2.0
"""Seconds between two scans for processes that a side has started."""
LEAVE_S = 15.0
"""Seconds for a side to end after its last step, and again after a signal."""
KILLED_S = 60.0
"""Seconds for killed processes to disappear."""
PINNED = ("sglang", "transformers", "flash-attn", "tensordict", "torch")
"""Packages for which verl requires a version."""


def values(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the values for the braces in both sides' flags."""
    return {
        **vars(options),
        **{"model": options.out / "model", "prompts_file": options.out / "prompts.jsonl", "folder": folder},
        **{"batch": options.prompts * options.samples, "twice_tokens": 2 * options.tokens, "root": ROOT},
    }


def slime_words(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the command that starts slime."""
    flags = SLIME if options.shape == "tiny" else SLIME + SLIME_ENGINE
    words = flags.format(**values(options, folder)).split()
    return [sys.executable, str(ROOT / "train.py"), *words, *shlex.split(options.slime)]


def verl_words(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the command that starts verl."""
    words = VERL.format(**values(options, folder)).split()
    return [sys.executable, "-m", "verl.trainer.main_ppo", *words, *shlex.split(options.verl)]


def read_steps(name: str, folder: Path) -> phases.Steps:
    """Return the steps that a side has logged so far."""
    if name == "verl":
        return phases.read_verl(folder / "metrics.jsonl")
    found = sorted(folder.glob("runs/*/metrics.jsonl"))
    return phases.read_slime(found[-1]) if found else []


def run_side(name: str, words: list[str], options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """Run a job to the end of its steps, or for ``limit_s``; return its steps, each with its end time."""
    folder = options.out / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "agent_loop.yaml").write_text(AGENT_LOOP)
    environment = os.environ | {
        **{"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "RAY_ADDRESS": "local", "no_proxy": "*"},
        **{"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"},
        **{"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": QUIET},
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
    }
    began = looked = time.time()
    ends: list[float] = []
    started: dict[int, psutil.Process] = {}
    with (folder / "log").open("wb") as log:
        job = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, cwd=folder, env=environment)
    try:
        while job.poll() is None and len(ends) < options.steps and time.time() < began + limit_s:
            steps = read_steps(name, folder)
            ends += [time.time()] * (len(steps) - len(ends))
            if time.time() > looked + CHILDREN_S:
                looked = time.time()
                started |= {child.pid: child for child in children(job.pid)}
            time.sleep(LOOK_S)
    finally:
        stop(job, started)
    steps = read_steps(name, folder)
    ends += [time.time()] * (len(steps) - len(ends))
    print(
        f"{name}: {len(steps)} of {options.steps} steps in {time.time() - began:.0f} s, status {job.returncode}",
        flush=True,
    )
    if len(steps) < options.steps:
        print((folder / "log").read_text(errors="replace")[-4000:], flush=True)
    return {
        "steps": [step | {"end": end - began} for step, end in zip(steps, ends, strict=True)],
        "status": job.returncode,
        "words": words[1:],
    }


def children(pid: int) -> list[psutil.Process]:
    """Return all descendants of a process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def stop(job: subprocess.Popen[bytes], started: dict[int, psutil.Process]) -> None:
    """Let a job end, then kill everything that it started: the next side needs the whole GPU."""
    started |= {child.pid: child for child in children(job.pid)}
    for signal_number in (None, signal.SIGTERM, signal.SIGKILL):
        if signal_number is not None:
            job.send_signal(signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(timeout=LEAVE_S)
            break
    left = [child for child in started.values() if child.is_running()]
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(left, timeout=KILLED_S)


def installed(package: str) -> str | None:
    """Return a package's version, None if it is not installed."""
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


def deviations() -> list[str]:
    """Return deviations from the requirements that verl declares."""
    found = []
    for line in requires("verl") or []:
        wanted = Requirement(line)
        marker = wanted.marker
        if wanted.name not in PINNED or not any(
            marker is None or marker.evaluate({"extra": extra}) for extra in ("sglang", "fsdp", "verl-core")
        ):
            continue
        have = installed(wanted.name)
        if wanted.specifier and (have is None or not wanted.specifier.contains(have.split("+")[0], prereleases=True)):
            found.append(f"{wanted.name}{wanted.specifier} (here {have or 'none'})")
    if importlib.util.find_spec("flash_attn") and not importlib.util.find_spec("flash_attn_2_cuda"):
        found.append("flash-attn's compiled part (here torch's own FlashAttention-2 behind the same names)")
    return sorted(set(found))


PHASES_NOTE = (
    "verl's generation ends with its engine asleep; slime's engine falls asleep in the rest. Where there is one "
    "optimizer step a rollout, slime takes the old log-probs from the training step itself."
)


def workload_note(options: argparse.Namespace, tokens: int, order: list[str]) -> str:
    """Return a description of the workload."""
    return (
        f"Random weights of the shape of {options.shape}; {options.prompts} prompts x {options.samples} samples; "
        f"response lengths log-normal (median {options.median:g}, sigma {options.sigma:g}, cap {options.cap}), forced "
        f"on both sides, {tokens:,} tokens a step on average; GRPO with a KL term, token-mean loss, one optimizer "
        f"step a rollout, micro-batches of {options.tokens:,} tokens, {options.warm_up} steps not measured. Engines: "
        f"{options.attention} attention, torch's sampling, decode graphs, memory share {options.memory:g}, "
        f"{options.requests} requests. In this order: {', '.join(order)}; a later one finds the kernels that an "
        "earlier one compiled."
    )


def result(options: argparse.Namespace, sides: dict[str, dict[str, Any]], tokens: int) -> dict[str, Any]:
    """Return the run as a file of benchmarks/results."""
    steps = {name: sides.get(name, {}).get("steps", []) for name in ("slime", "verl")}
    made = phases.table(steps["slime"], steps["verl"], options.warm_up, tokens)
    first = [round(steps[name][0]["end"], 1) if steps[name] else "-" for name in ("slime", "verl")]
    made["rows"].append(["from the start to the end of the first step", *first, "", ""])
    every = [
        [name, number, *(round(step[span], 3) if span in step else "-" for span in SHOWN[name]), round(step["end"], 1)]
        for name in steps
        for number, step in enumerate(steps[name], start=1)
    ]
    notes = [workload_note(options, tokens, list(sides)), PHASES_NOTE]
    if installed("verl"):
        notes.append("Not as verl 0.9.1 asks: " + ("; ".join(deviations()) or "nothing") + ".")
    notes += [f"Flags of {name}: {' '.join(shown_words(sides[name]['words'], options))}" for name in sides]
    notes += [
        f"{name} ended early, with status {side['status']}." for name, side in sides.items() if short(side, options)
    ]
    more = {name: have for name in ("verl", "tensordict", "flash-attn", "triton") if (have := installed(name))}
    return {
        **{"title": "Beside verl on one GPU", "group": "Whole jobs", "date": datetime.now(UTC).date().isoformat()},
        **{"hardware": results_page.find_hardware(), "versions": results_page.versions() | more},
        "command": "python benchmarks/peers/run.py " + shlex.join(sys.argv[1:]),
        **{"commit": results_page.commit(), "notes": notes},
        "tables": [made, {"title": "Every step, seconds", "columns": STEP_COLUMNS, "rows": every}],
    }


SHOWN = {
    "slime": ("wait_for_rollout", "log_probs", "ref_log_probs", "actor_train", "push"),
    "verl": ("gen", "old_log_prob", "ref", "update_actor", "update_weights"),
}
STEP_COLUMNS = ["side", "step", "generation", "old log-probs", "reference", "update", "push", "end, since the start"]


def short(side: dict[str, Any], options: argparse.Namespace) -> bool:
    """Return True if a job did not finish all its steps."""
    return len(side["steps"]) < options.steps


def shown_words(words: list[str], options: argparse.Namespace) -> list[str]:
    """Return a job's command without this machine's paths."""
    return [word.replace(str(options.out), "OUT").replace(f"{ROOT}/", "") for word in words]


def parse_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder")
    parser.add_argument(
        "--sides", nargs="+", default=["slime", "verl"], choices=["slime", "verl"], help="in this order"
    )
    parser.add_argument("--shape", default="qwen3-0.6B", choices=[*workload.SHAPES])
    parser.add_argument("--steps", type=int, default=7, help="of each side")
    parser.add_argument("--warm-up", type=int, default=2, help="steps that are not measured, at least one")
    parser.add_argument("--prompts", type=int, default=32, help="of a step")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt")
    parser.add_argument("--median", type=float, default=700, help="of the response lengths, tokens")
    parser.add_argument("--sigma", type=float, default=0.6, help="of their logarithm")
    parser.add_argument("--cap", type=int, default=2048, help="longest response")
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--memory", type=float, default=0.5, help="share of the GPU's memory that the engine takes")
    parser.add_argument("--requests", type=int, default=256, help="that the engine runs at a time")
    parser.add_argument("--attention", default="triton", help="backend of the engine, for both")
    parser.add_argument(
        "--limit-s", type=float, default=1800, help="for both sides; each has a fair part of what is left"
    )
    parser.add_argument("--slime", default="", metavar="FLAGS", help="more flags of train.py, one word of the shell")
    parser.add_argument(
        "--verl", default="", metavar="OVERRIDES", help="more overrides of verl, one word of the shell"
    )
    options = parser.parse_args()
    if options.warm_up < 1 or options.steps <= options.warm_up:
        parser.error(f"--warm-up {options.warm_up} must be at least 1 and below --steps {options.steps}")
    if "verl" in options.sides and importlib.util.find_spec("verl") is None:
        parser.error("verl is not installed: pip install 'verl[sglang]==0.9.1', or --sides slime")
    options.out = options.out.resolve()
    return options


def main() -> None:
    """Run the sides, and print and write the table."""
    options = parse_options()
    deadline = time.monotonic() + options.limit_s
    options.out.mkdir(parents=True, exist_ok=True)
    tokens = workload.write(options.out, options)
    words: dict[str, Callable[..., list[str]]] = {"slime": slime_words, "verl": verl_words}
    sides: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(options.sides):
        limit_s = (deadline - time.monotonic()) / (len(options.sides) - number)
        sides[name] = run_side(name, words[name](options, options.out / name), options, limit_s)
        (options.out / "sides.json").write_text(json.dumps(sides))
    made = result(options, sides, tokens)
    results_page.save("peers", made, options.out)
    print("\n".join([phases.markdown(made["tables"][0]), "", *made["notes"]]), flush=True)
    if any(short(side, options) for side in sides.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
