"""The contracts of the trainer's side, on one rank without a GPU; what needs a whole model is checked by signature."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist

from slime.ray.rollout_data import split_for_ranks, train_data_from_samples
from slime.rollout.base_types import leaf_samples
from slime.utils.misc import load_function
from tools.plugin_check.bench import Bench
from tools.plugin_check.findings import Findings, expect
from tools.plugin_check.rollout_contracts import ONE_RANK


def rank_data(args: Namespace, bench: Bench) -> dict[str, Any]:
    """One rank's rollout data as the hooks after the advantages see it."""
    per_rank = split_for_ranks(
        args, train_data_from_samples(args, list(leaf_samples(bench.groups(args, 2)))), ONE_RANK
    )
    data = per_rank[0].to_dict()
    data["loss_masks"] = [torch.as_tensor(mask) for mask in data["loss_masks"]]
    lengths = data["response_lengths"]
    generator = torch.Generator().manual_seed(0)
    for name in ("log_probs", "ref_log_probs", "rollout_log_probs"):
        data[name] = [-torch.rand(length, generator=generator) for length in lengths]
    for name in ("kl", "advantages", "returns"):
        data[name] = [torch.randn(length, generator=generator) for length in lengths]
    return data


def check_per_token(data: dict[str, Any], name: str) -> None:
    """A column with one finite tensor for each sample, as long as its response."""
    values = data.get(name)
    tensors = isinstance(values, list) and all(isinstance(value, torch.Tensor) and value.ndim for value in values)
    expect(tensors, f"{name} is {_shown(values)}; it must be a list of one tensor for each sample")
    expect([len(v) for v in values] == list(data["response_lengths"]), f"{name} are not as long as the responses")
    expect(all(bool(torch.isfinite(v).all()) for v in values), f"{name} are not finite")


def _shown(values: Any) -> str:
    first = f" of {type(values[0]).__name__}" if isinstance(values, list) and values else ""
    return f"a {type(values).__name__}{first}"


def start(args: Namespace) -> None:
    """Start Megatron's parallel state of one rank, which losses may ask for."""
    from slime.backends.megatron_utils.initialize import init

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), world_size=1, rank=0)
    init(args)


def _postprocess(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    args = bench.args(flag, path, trainer=True)
    with findings.step("it edits a rank's data in place"):
        data = rank_data(args, bench)
        load_function(path)(args, 0, data)
        for name in ("advantages", "returns", "loss_masks"):
            check_per_token(data, name)


def _advantages(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    args = bench.args(flag, path, trainer=True)
    start(args)

    def set_columns(*missing: str) -> None:
        data = rank_data(args, bench)
        for name in ("advantages", "returns", *missing):
            data.pop(name)
        given = ", ".join(sorted(data))
        returned = load_function(path)(args, data)
        advice = f"; it returned a {type(returned).__name__}, which nobody reads" if returned is not None else ""
        for name in ("advantages", "returns"):
            expect(
                data.get(name) is not None,
                f'it got rollout_data with {given}, and must set rollout_data["advantages"] and ["returns"], each a '
                f"list of one tensor for each sample, as long as its response; {name} is not set{advice}",
            )
            check_per_token(data, name)

    what = "it sets advantages and returns, a tensor for each sample"
    if args.use_rollout_logprobs:
        with findings.step(f"{what} (with --use-rollout-logprobs there are no log_probs)"):
            set_columns("log_probs")
        return
    with findings.step(what):
        set_columns()
    if findings.failures:
        return
    try:
        set_columns("log_probs")
    except Exception as error:  # whatever a plug-in may raise
        what = f"a run with this flag has no log_probs; without them it raised {type(error).__name__}: {error}"
        findings.warn("--use-rollout-logprobs", f"{what}. Read rollout_log_probs there")


def batch_and_logits(args: Namespace, bench: Bench) -> tuple[dict[str, Any], torch.Tensor]:
    """A packed micro-batch of every sample, and random logits [1, T, V]."""
    data = rank_data(args, bench)
    tokens = [torch.as_tensor(ids) for ids in data["tokens"]]
    batch = {
        **{name: data[name] for name in ("log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "returns")},
        "tokens": torch.cat(tokens)[None],
        "unconcat_tokens": tokens,
        "total_lengths": data["total_lengths"],
        "response_lengths": data["response_lengths"],
        "loss_masks": data["loss_masks"],
        "rollout_mask_sums": torch.as_tensor(data["rollout_mask_sums"], dtype=torch.float32),
    }
    torch.manual_seed(0)
    return batch, torch.randn(1, sum(data["total_lengths"]), args.padded_vocab_size).requires_grad_()


def policy_loss(args: Namespace, bench: Bench, loss_type: str) -> tuple[torch.Tensor, dict[str, torch.Tensor], Any]:
    """The loss of the micro-batch, by the function that the trainer calls."""
    from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean
    from slime.backends.megatron_utils.loss import LOSSES

    batch, logits = batch_and_logits(args, bench)
    reducer = get_sum_of_sample_mean(
        batch["total_lengths"],
        batch["response_lengths"],
        batch["loss_masks"],
        batch["rollout_mask_sums"],
        args.calculate_per_token_loss,
    )
    value, metrics = LOSSES[loss_type](args, batch, logits, reducer)
    return value, metrics, logits


def check_loss(value: torch.Tensor, metrics: dict[str, Any], logits: torch.Tensor) -> None:
    """A finite scalar with a gradient, and scalar metrics."""
    expect(isinstance(value, torch.Tensor) and value.dim() == 0, "the loss is no scalar tensor")
    expect(bool(torch.isfinite(value)), f"the loss is {value.item()}")
    for name, metric in metrics.items():
        expect(isinstance(metric, torch.Tensor) and metric.numel() == 1, f"metric {name} is no scalar tensor")
    value.backward()
    expect(
        logits.grad is not None and bool(torch.isfinite(logits.grad).all()), "the gradient is missing or not finite"
    )
    expect(float(logits.grad.abs().sum()) > 0, "the gradient is zero; was something detached?")


def _estimator(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    from slime.backends.megatron_utils.advantages import compute_advantages_and_returns

    args = bench.args(flag, path, trainer=True)
    start(args)
    with findings.step("advantages and returns of groups, one number for each token"):
        data = rank_data(args, bench)
        del data["advantages"], data["returns"]
        compute_advantages_and_returns(args, data)
        for name in ("advantages", "returns"):
            check_per_token(data, name)
        expect(any(bool(v.any()) for v in data["advantages"]), "all advantages are 0; nothing would be learned")
    with findings.step("a finite policy loss with a gradient, and scalar metrics"):
        check_loss(*policy_loss(args, bench, "policy_loss"))


def _custom_loss(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    args = bench.args(flag, path, "--loss-type", "custom_loss", trainer=True)
    start(args)
    with findings.step("a finite loss with a gradient, and scalar metrics"):
        check_loss(*policy_loss(args, bench, "custom_loss"))


def _tis(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    for use in ("--use-tis", "--get-mismatch-metrics"):
        args = bench.args(flag, path, use, trainer=True)
        start(args)
        with findings.step(f"it corrects the policy loss, with {use}"):
            check_loss(*policy_loss(args, bench, "policy_loss"))


def _reducer(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    args = bench.args(flag, path, trainer=True)
    start(args)
    with findings.step("its reducer makes a scalar of the policy loss"):
        check_loss(*policy_loss(args, bench, "policy_loss"))


def _megatron_init(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    args = bench.args(flag, path, trainer=True)
    with findings.step("it runs at the end of Megatron's start"):
        start(args)  # calls the hook itself


def _before_log_prob(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    args = bench.args(flag, path, trainer=True)
    for prefix in ("", "ref_", "teacher_"):
        with findings.step(f"it runs before a forward pass with the prefix {prefix!r}"):
            load_function(path)(args, [torch.nn.Linear(4, 4).eval()], prefix)


def _before_train_step(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    args = bench.args(flag, path, trainer=True)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with findings.step("it runs before an optimizer step"):
        load_function(path)(args, 0, 0, [model], optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))


def _signature_only(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    findings.warn("not called", "it needs a model or engines; only its import and signature were checked")


OTHERS = {"--advantage-estimator": _estimator}
"""Of flags that are no hooks."""
CONTRACTS = {
    "--rollout-data-postprocess-path": _postprocess,
    "--custom-advantage-function-path": _advantages,
    "--custom-loss-function-path": _custom_loss,
    "--custom-tis-function-path": _tis,
    "--custom-pg-loss-reducer-function-path": _reducer,
    "--custom-model-provider-path": _signature_only,
    "--custom-megatron-init-path": _megatron_init,
    "--custom-megatron-before-log-prob-hook-path": _before_log_prob,
    "--custom-megatron-before-train-step-hook-path": _before_train_step,
    "--custom-update-weight-post-write-path": _signature_only,
    "--sglang-custom-pull-weights-pre-read-hook": _signature_only,
}
