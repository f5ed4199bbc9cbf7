"""A whole GRPO step in one process, with the functions that a job uses.  Read it from top to bottom.

    python examples/tiny_arithmetic/make_task.py --output runs/tiny/task
    python examples/one_step.py --steps 3

In a job, Ray places this on many GPUs, SGLang generates instead of transformers, every rank trains a share of the
batch, and a transport moves the weights between processes.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from slime.backends.sglang_utils import cpu_shim  # noqa: E402

cpu_shim.install()  # without a GPU, transformers and SGLang can be imported only after this

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: E402

from slime.backends.megatron_utils.actor import MegatronTrainRayActor  # noqa: E402
from slime.backends.megatron_utils.megatron_to_hf import hf_form  # noqa: E402
from slime.backends.megatron_utils.update_weight.gather import iter_hf_tensors  # noqa: E402
from slime.flags.parse import parse_args  # noqa: E402
from slime.ray.rollout_data import split_for_ranks, train_data_from_samples  # noqa: E402
from slime.rollout.data_source import RolloutDataSource  # noqa: E402
from slime.rollout.rm_hub import batched_async_rm  # noqa: E402
from slime.utils.net import find_available_port  # noqa: E402
from slime.utils.processing_utils import load_tokenizer  # noqa: E402
from slime.utils.types import Sample  # noqa: E402

FLAGS = """
    --hf-checkpoint {task}/hf --ref-load {task}/hf --debug-train-only --actor-num-nodes 1 --actor-num-gpus-per-node 1
    --prompt-data {task}/data/grpo.jsonl --input-key prompt --label-key label --apply-chat-template
    --custom-rm-path examples.one_step.reward --num-rollout {steps} --rollout-batch-size 8 --n-samples-per-prompt 8
    --rollout-max-response-len 24 --global-batch-size 64 --use-dynamic-batch-size --max-tokens-per-gpu 4096
    --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --optimizer adam --lr 1e-3 --lr-decay-style constant
"""


async def reward(args: Namespace, samples: list[Sample], **kwargs: Any) -> list[float]:
    """Return the fraction of digits in each response, a reward that even an untrained model sometimes earns."""
    return [sum(letter.isdigit() for letter in sample.response) / max(len(sample.response), 1) for sample in samples]


def start_trainer(args: Namespace) -> MegatronTrainRayActor:
    """Start the trainer as the only rank: a Megatron model with the weights of ``--ref-load``, and its optimizer."""
    trainer = MegatronTrainRayActor()
    trainer.set_rendezvous(1, 0, "127.0.0.1", find_available_port(21000))
    trainer.init(args, "actor")
    return trainer


@torch.no_grad()
def answer(args: Namespace, policy: PreTrainedModel, tokenizer: Any, group: Sequence[Sample]) -> None:
    """Sample a response with log-probs for each sample of a prompt, as an engine does in a job."""
    prompt = tokenizer(group[0].prompt, add_special_tokens=False, return_tensors="pt").input_ids
    output = policy.generate(
        prompt, do_sample=True, temperature=args.rollout_temperature, top_k=0, top_p=1.0, output_logits=True,
        max_new_tokens=args.rollout_max_response_len, num_return_sequences=len(group), return_dict_in_generate=True,
    )  # fmt: skip
    log_probs = (torch.stack(output.logits, dim=1) / args.rollout_temperature).log_softmax(-1)
    drawn = output.sequences[:, prompt.shape[1] :]
    log_probs = log_probs.gather(-1, drawn[..., None])[..., 0]
    for sample, tokens, values in zip(group, drawn.tolist(), log_probs.tolist(), strict=True):
        is_whole = tokenizer.eos_token_id in tokens
        length = tokens.index(tokenizer.eos_token_id) + 1 if is_whole else len(tokens)
        sample.tokens = [*prompt[0].tolist(), *tokens[:length]]
        sample.response_length, sample.rollout_log_probs = length, values[:length]
        sample.response = tokenizer.decode(tokens[:length], skip_special_tokens=True)
        sample.status = Sample.Status.COMPLETED if is_whole else Sample.Status.TRUNCATED


def push(args: Namespace, trainer: MegatronTrainRayActor, policy: PreTrainedModel) -> None:
    """Copy the trainer's weights, under their Hugging Face names, into the model that generates."""
    own = policy.state_dict()
    form = hf_form(args, policy.config.model_type)
    for name, tensor in iter_hf_tensors(form, trainer.model, dtype=torch.float32):
        own[name].copy_(tensor)


def take_step(
    args: Namespace, trainer: MegatronTrainRayActor, policy: PreTrainedModel, tokenizer: Any,
    source: RolloutDataSource, rollout_id: int,
) -> float:  # fmt: skip
    """Generate, grade, normalize within groups, pack, train and push; return the mean reward."""
    groups = source.get_samples(args.rollout_batch_size)
    for group in groups:
        answer(args, policy, tokenizer, group)
    samples = [sample for group in groups for sample in group]
    for sample, value in zip(samples, asyncio.run(batched_async_rm(args, samples)), strict=True):
        sample.reward = value
    batch = train_data_from_samples(args, samples)  # group-relative rewards; samples -> columns
    (share,) = split_for_ranks(args, batch, trainer.get_parallel_config())  # packed micro-batches of the only rank
    trainer.train(rollout_id, share)  # old log-probs, advantages per token, loss, gradient, Adam
    push(args, trainer, policy)
    return sum(sample.reward for sample in samples) / len(samples)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Run the command line; return the mean reward of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", type=Path, default=REPO / "runs/tiny/task", help="folder of make_task.py")
    parser.add_argument("--steps", type=int, default=1)
    options, more = parser.parse_known_args(argv)
    args = parse_args(argv=[*shlex.split(FLAGS.format(**vars(options))), *more])
    torch.manual_seed(args.seed)
    trainer = start_trainer(args)
    policy = AutoModelForCausalLM.from_pretrained(args.hf_checkpoint, dtype=torch.float32)
    tokenizer = load_tokenizer(args.hf_checkpoint)
    source = RolloutDataSource(args)
    rewards = []
    for rollout_id in range(args.num_rollout):
        rewards.append(take_step(args, trainer, policy, tokenizer, source, rollout_id))
        print(f"step {rollout_id + 1}/{args.num_rollout}: mean reward {rewards[-1]:.3f}", flush=True)
    return rewards


if __name__ == "__main__":
    main()
