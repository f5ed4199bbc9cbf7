"""Runs with a known fault, written by the recorder like a job's processes write them.

    python -m tests.ext.record.prepared_runs FOLDER        all of them, each with its report

A policy, one table of logits over ``WORDS``, is trained by policy gradient to say "good": its tokens,
log-probs and rewards are real; times and engines follow a script.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slime.observability.metrics_file import append_record
from slime.observability.rollout_metrics import compute_rollout_record
from slime.utils.types import Sample
from tests.ext.record import recording

NUM_STEPS, GROUPS, GROUP, START_S = 16, 8, 4, 1_790_000_000.0
TRAIN_S, PUSH_S = 1.5, 0.2
FAULT_STEP = 6
"""The step, counted from 1, at which a fault that is not present from the start begins."""
WORDS = ["<unk>", "<|user|>", "<|end|>", "good", "bad", "maybe", "indeed", "so", "very", "quite", "one", "two"]
GOOD = WORDS.index("good")
ENGINES = ("10.0.0.1:15000", "10.0.0.2:15000", "10.0.0.3:15000")
FAULTS = {
    "healthy": set(),
    "dead expert": {"dead experts"},
    "length hack": {"length pays", "length explosion"},
    "straggling engine": {"straggling engine"},
    "wrong template": {"chat template", "all-zero rewards"},
    "off-policy": {"mismatch", "entropy collapse"},
}
"""Fault -> the alarms that its report must show."""


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of ``WORDS``; its chat template marks a message with <|user|>."""
    tokenizer = Tokenizer(models.WordLevel(dict(zip(WORDS, range(len(WORDS)))), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": WORDS[1:3]})
    fast.save_pretrained(folder)


def write_prepared_run(folder: Path, fault: str) -> Path:
    """Write the run with this fault, one of ``FAULTS``, into ``folder``, which is named after it."""
    model = folder / "hf"
    write_tokenizer(model)
    flags = {
        "hf_checkpoint": str(model), "num_rollout": NUM_STEPS, "rollout_num_gpus": 3, "actor_num_gpus_per_node": 1,
        "advantage_estimator": "grpo", "eps_clip": 0.2, "n_samples_per_prompt": GROUP, "reward_key": None,
    }  # fmt: skip
    args = Namespace(save=str(folder), value_origins=dict.fromkeys(flags, "flag"), **flags)
    recording.start(args, "driver", primary=True)
    recording.event("start", rollout=0)
    recording.start(args, "rollout manager")
    generator = torch.Generator().manual_seed(0)
    logits, begins = [torch.zeros(len(WORDS))], [START_S]
    for step in range(NUM_STEPS):
        policy, generated = _step(folder, args, fault, step, begins[-1], logits, generator)
        logits.append(policy)
        begins.append(generated + TRAIN_S + PUSH_S)
    recording.start(args, "driver")
    for step, (begin, end) in enumerate(pairwise(begins)):
        recording.span("step", begin, end, rollout=step)
        recording.span("push", end - PUSH_S, end)
        append_record(folder / "metrics.jsonl", {"perf/time_step_s": end - begin, "rollout/step": step})
    recording.start(args, "actor 0")
    for end in begins[1:]:
        for place, part in enumerate(("forward", "backward", "optimizer")):
            begin = end - PUSH_S - TRAIN_S * (3 - place) / 3
            recording.span(part, begin, begin + TRAIN_S / 3)
    recording.event("finish")
    recording.stop()
    return folder


def _step(
    folder: Path,
    args: Namespace,
    fault: str,
    step: int,
    begin: float,
    logits: list[torch.Tensor],
    generator: torch.Generator,
) -> tuple[torch.Tensor, float]:
    """Record one step of the policy, ``logits[-1]``; return the next policy and the end of generation."""
    is_faulty = step + 1 >= FAULT_STEP
    held = logits[FAULT_STEP - 1] if fault == "off-policy" and is_faulty else logits[-1]  # pushes no longer arrive
    samples = [_sample(fault, step, begin, i, held, generator) for i in range(GROUPS * GROUP)]
    rewards = torch.tensor([float(one.reward) for one in samples]).view(GROUPS, GROUP)
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
    end = max(event["ts"] for one in samples for event in one.trace["events"])
    recording.span("rollout", begin, end, rollout=step)
    recording.rollout(step, samples, advantages.tolist())
    policy = logits[-1].clone().requires_grad_()
    log_probs = [policy.log_softmax(0)[one.tokens] for one in samples]
    loss = -torch.stack([a * lp.mean() for a, lp in zip(advantages, log_probs)]).mean()
    (gradient,) = torch.autograd.grad(loss, policy)
    trained = [lp.detach() + 1e-4 * torch.randn(len(lp), generator=generator) for lp in log_probs]
    columns = {"trainer_log_probs": trained, "advantages": [a.expand(len(lp)) for a, lp in zip(advantages, trained)]}
    recording.trained(step, 0, range(len(samples)), columns)
    differences = torch.cat([t - torch.tensor(one.rollout_log_probs) for t, one in zip(trained, samples)])
    idle = 0.25 if fault == "dead expert" and is_faulty else 0.0
    probabilities = policy.detach().softmax(0)
    record = compute_rollout_record(args, step, samples, None, end - begin)
    append_record(folder / "metrics.jsonl", record)
    train = {
        "train/loss": loss.item(), "train/pg_loss": loss.item(), "train/grad_norm": gradient.norm().item(),
        "train/entropy_loss": -(probabilities * probabilities.log()).sum().item(),
        "train/train_rollout_logprob_abs_diff": differences.abs().mean().item(), "train/step": step,
    }  # fmt: skip
    load = {
        f"train/expert_load/layer_{layer}/{name}": value
        for layer in range(1, 5)
        for name, value in (
            ("idle", idle if layer == 3 else 0.0),
            ("max_over_mean", 4.0 if idle and layer == 3 else 1.3),
        )
    }
    worst = {"train/expert_load/worst_idle": idle, "train/expert_load/worst_max_over_mean": 4.0 if idle else 1.3}
    append_record(folder / "metrics.jsonl", train | load | worst)
    rate = 0.0 if fault == "wrong template" else 45.0
    return logits[-1] - rate * gradient, end


def _sample(
    fault: str, step: int, begin: float, index: int, logits: torch.Tensor, generator: torch.Generator
) -> Sample:
    """Return an answer of the policy, its engine and its duration."""
    length = 8 + int(torch.randint(5, (1,), generator=generator))
    if fault == "length hack":
        length += 2 * step + int(torch.randint(6, (1,), generator=generator))
    if fault == "wrong template":
        length = 32
    ids = torch.multinomial(logits.softmax(0)[3:], length, replacement=True, generator=generator) + 3
    reward = {"length hack": length / 80, "wrong template": 0.0}.get(fault, (ids == GOOD).double().mean().item())
    mark = "<|im_start|> user" if fault == "wrong template" else "<|user|>"
    sample = Sample(
        index=step * GROUPS * GROUP + index, group_index=step * GROUPS + index // GROUP,
        prompt=f"{mark} prompt {index // GROUP % 4} <|end|>", label="good", reward=reward,
        response=" ".join(WORDS[i] for i in ids.tolist()), response_length=length, tokens=ids.tolist(),
        rollout_log_probs=logits.log_softmax(0)[ids].tolist(), weight_versions=[str(step + 1)],
        status=Sample.Status.TRUNCATED if fault == "wrong template" else Sample.Status.COMPLETED,
    )  # fmt: skip
    engine = index % len(ENGINES)
    is_slow = fault == "straggling engine" and engine == 1 and step + 1 >= FAULT_STEP
    end = begin + length / (1.0 if is_slow else 4.0)
    attrs = {"engine": ENGINES[engine], "completion_tokens": length}
    start = {"type": "span_start", "name": "sglang_generate", "ts": begin, "span_id": str(index), "attrs": {}}
    sample.trace = {"events": [start, start | {"type": "span_end", "ts": end, "attrs": attrs}]}
    return sample


if __name__ == "__main__":
    from tools.report import main

    for name in FAULTS:
        main([str(write_prepared_run(Path(sys.argv[1]) / name.replace(" ", "-"), name))])
