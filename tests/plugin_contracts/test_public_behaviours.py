"""Behavior that plug-ins written for slime rely on beyond names: pieces of such plug-ins, run unchanged."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.observability.dumps import save_rollout_dump, save_train_dump
from slime.ray.rollout_data import train_data_from_samples
from slime.rollout.base_types import leaf_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
from slime.utils.async_utils import run
from slime.utils.misc import decode_int32_meta_array
from slime.utils.ppo_utils import calculate_log_probs_and_entropy
from slime.utils.types import Sample
from tools.plugin_check.bench import Bench

GENERATE = {
    "a tool loop that holds the mask and writes it back": """
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post

async def hook(args, sample, sampling_params):
    state = GenerateState(args)
    loss_masks = []
    sample.tokens = state.tokenizer.encode(sample.prompt, add_special_tokens=False)
    sample.loss_mask, sample.rollout_log_probs = loss_masks, []
    tokens = sample.tokens
    for turn in range(2):
        payload = {"input_ids": tokens, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", payload)
        meta = output["meta_info"]
        sample.append_response_tokens(
            args,
            tokens=[item[1] for item in meta["output_token_logprobs"]],
            log_probs=[item[0] for item in meta["output_token_logprobs"]],
            meta_info=meta,
            text=output["text"],
        )
        if turn == 0:
            sample.append_response_tokens(args, tokens=[65, 66], trainable=False, text="AB")
    sample.loss_mask = loss_masks
    return sample
""",
    "an environment whose result becomes a sample with a text as its status": """
from slime.utils.types import Sample

async def hook(args, sample, sampling_params):
    status = {"done": "completed", "cut": "truncated"}["done"]
    return Sample(
        index=sample.index, group_index=sample.group_index, prompt=sample.prompt, tokens=[1, 2, 3], response="ab",
        response_length=2, loss_mask=[1, 1], rollout_log_probs=[-0.5, -0.5], reward=1.0, status=status,
    )
""",
    "an engine that ends a response for a reason of its own": """
from slime.utils.types import Sample

async def hook(args, sample, sampling_params):
    sample.tokens = [1]
    sample.status = Sample.Status.COMPLETED
    meta = {"finish_reason": {"type": "content_filter"}, "weight_version": "1"}
    sample.append_response_tokens(args, tokens=[2, 3], log_probs=[-0.5, -0.5], meta_info=meta, text="ab")
    return sample
""",
}


@pytest.mark.parametrize("source", GENERATE.values(), ids=GENERATE)
def test_generate_functions_of_users_give_samples_that_train(source: str, tmp_path: Path, monkeypatch) -> None:
    name = f"users_generate_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    bench = Bench(tmp_path, ["--custom-generate-function-path", f"{name}.hook"])
    args = bench.args()
    with bench.engine(args):

        async def batch() -> list[Any]:
            groups = RolloutDataSourceWithBuffer(args).get_samples(args.rollout_batch_size)
            params = GenerateState(args).sampling_params
            return [await generate_and_rm_group(args, group, params) for group in groups]

        samples = list(leaf_samples(run(batch())))
    assert {sample.status for sample in samples} == {Sample.Status.COMPLETED}
    for sample in samples:
        assert len(sample.loss_mask) == sample.response_length == len(sample.rollout_log_probs) > 0
        assert sum(sample.loss_mask) > 0
    assert len(train_data_from_samples(args, samples).tokens) == len(samples)
    sys.modules.pop(name)


def test_a_loss_that_squeezes_the_last_dimension_gets_one_number_a_token() -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([0, 6, 2])
    log_prob, entropy = calculate_log_probs_and_entropy(logits, tokens, None, with_entropy=True)
    mask = torch.ones(3)
    assert (log_prob.squeeze(-1) * mask).shape == (3,) and entropy.shape == (3,)
    torch.testing.assert_close(log_prob.squeeze(-1), logits.log_softmax(-1)[range(3), tokens])


def test_integers_of_an_answer_come_as_a_tensor_that_can_be_reshaped_and_moved() -> None:
    rows = decode_int32_meta_array({"routed_experts": [0, 1, 2, 3]}, "routed_experts").view(2, 2).to(torch.long)
    assert rows.tolist() == [[0, 1], [2, 3]]


def test_readers_of_dumps_find_their_keys(tmp_path: Path) -> None:
    path = save_rollout_dump(str(tmp_path / "{rollout_id}.pt"), 4, [Sample()], evaluation=True)
    assert (path.name, torch.load(path, weights_only=False)["rollout_id"]) == ("eval_4.pt", 4)
    shard = {"dp_rank": 0, "partition": [0], "samples": [{"tokens": [1]}]}
    dump = torch.load(save_train_dump(str(tmp_path / "train.pt"), 4, 0, [shard]), weights_only=False)
    assert dump["format_version"] == 2
    assert {"sample_index", "data_parallel_rank"} <= dump["samples"][0].keys()
