"""The contracts of the rollout side.  Each function is called as ``contract(findings, bench, flag, path)``."""

from __future__ import annotations

import copy
import math
from argparse import Namespace
from typing import Any

from slime.observability.rollout_metrics import compute_eval_record
from slime.ray.rollout_data import check_fan_out, split_for_ranks, train_data_from_samples
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn, leaf_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.filter_hub.base_types import call_dynamic_filter
from slime.rollout.rm_hub import asks_for_lists, async_rm, batched_async_rm
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
from slime.train_data.columns import TrainBatch
from slime.utils.misc import load_function
from slime.utils.types import Sample
from tools.plugin_check.bench import GROUP_SIZE, Bench, fanned_out
from tools.plugin_check.findings import Findings, expect

ONE_RANK = {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
ODD_RESPONSES = ("", " ", "\\boxed{", "\\boxed{1/0}", "\x00\u202e\U0001f600" * 50, "word " * 5000)


def check_sample(args: Namespace, sample: Any) -> None:
    """A finished sample that training can take."""
    expect(isinstance(sample, Sample), f"a sample is a {type(sample).__name__}")
    length = sample.response_length
    expect(sample.status in Sample.Status, f"status is {sample.status!r}")
    expect(0 <= length < len(sample.tokens), f"response_length {length} with {len(sample.tokens)} tokens")
    for name in ("loss_mask", "rollout_log_probs"):
        values = getattr(sample, name)
        expect(values is None or len(values) == length, f"{name} is not as long as the response ({length})")
    if sample.loss_mask is not None:
        expect(set(sample.loss_mask) <= {0, 1}, "loss_mask holds other values than 0 and 1")


def check_reward(args: Namespace, reward: Any) -> None:
    """A reward that training can take: a finite number, or a dict that has --reward-key."""
    if isinstance(reward, dict):
        expect(args.reward_key, f"the reward is a dict with {', '.join(map(str, reward))}; give --reward-key too")
        expect(args.reward_key in reward, f"the reward has no entry {args.reward_key!r}: {reward}")
        reward = reward[args.reward_key]
    expect(isinstance(reward, int | float), f"the reward is {reward!r}; it must be a number")
    expect(math.isfinite(reward), f"the reward is {reward}; it must be finite")


def check_trainable(args: Namespace, groups: list[Any]) -> None:
    """Groups go all the way to the data of one trainer rank."""
    check_fan_out(groups)
    samples = list(leaf_samples(groups))
    for sample in samples:
        check_sample(args, sample)
        if args.custom_reward_post_process_path is None:
            check_reward(args, sample.reward)
    split_for_ranks(args, train_data_from_samples(args, samples), ONE_RANK)


def _rollout_function(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    args = bench.args(flag, path)
    function = load_function(path)
    with bench.engine(args):
        source = load_function(args.data_source_path)(args)
        for rollout_id in (0, 1):
            with findings.step(f"rollout {rollout_id} gives groups that can be trained"):
                output = call_rollout_fn(function, args, rollout_id, source, evaluation=False)
                expect(isinstance(output, RolloutFnTrainOutput), f"it returned {type(output).__name__}")
                expect(output.metrics is None or isinstance(output.metrics, dict), "metrics are no dict")
                check_trainable(args, output.samples)
                if len(output.samples) != args.rollout_batch_size:
                    findings.warn(
                        "groups", f"{len(output.samples)}; --rollout-batch-size is {args.rollout_batch_size}"
                    )


def _eval_function(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    args = bench.args(flag, path)
    with bench.engine(args), findings.step("an evaluation gives rewards that can be logged"):
        source = load_function(args.data_source_path)(args)
        output = call_rollout_fn(load_function(path), args, 0, source, evaluation=True)
        expect(isinstance(output, RolloutFnEvalOutput), f"it returned {type(output).__name__}")
        for name, entry in output.data.items():
            expect("rewards" in entry, f"data set {name} has no rewards, but {', '.join(entry)}")
            for other in ("truncated", "samples"):
                same = len(entry.get(other) or entry["rewards"]) == len(entry["rewards"])
                expect(same, f"data set {name}: {other} and rewards differ in length")
        compute_eval_record(args, 0, output.data, output.metrics)


def _data_source(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    args = bench.args(flag, path, engine=False)
    source = load_function(path)(args)
    groups: list[Any] = []
    with findings.step("get_samples gives so many groups of --n-samples-per-prompt samples, numbered throughout"):
        groups = source.get_samples(3) + source.get_samples(2)
        expect(len(groups) == 5, f"asked for 3 and 2 groups it gave {len(groups)}")
        sizes = {len(group) for group in groups}
        expect(sizes == {GROUP_SIZE}, f"groups have {sizes} samples; --n-samples-per-prompt is {GROUP_SIZE}")
        samples = list(leaf_samples(groups))
        expect(all(isinstance(sample, Sample) for sample in samples), "a group holds something else than samples")
        indices = [sample.index for sample in samples]
        expect(None not in indices and len(set(indices)) == len(indices), f"sample.index is not unique: {indices}")
        expect(len({id(sample) for sample in samples}) == len(samples), "samples are the same object; copy them")
    with findings.step("add_samples takes groups back, and get_samples gives them again"):
        source.add_samples(groups[1:3])
        again = {sample.index for sample in leaf_samples(source.get_samples(3))}
        given = {sample.index for sample in leaf_samples(groups[1:3])}
        expect(given <= again, f"samples {sorted(given)} were given back and did not come again: {sorted(again)}")
    with findings.step("save and load go on where it stood"):
        source.save(0)
        expected = [sample.index for sample in leaf_samples(source.get_samples(2))]
        args.load = args.save
        fresh = load_function(path)(args)
        fresh.load(0)
        found = [sample.index for sample in leaf_samples(fresh.get_samples(2))]
        expect(found == expected, f"after load(0) came samples {found}; without a restart {expected}")
    with findings.step("len() is the number of prompts in an epoch"):
        expect(isinstance(len(source), int), "len() is no number")


def _custom_generate(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    args = bench.args(flag, path)
    with bench.engine(args) as engine:

        async def groups(num: int, evaluation: bool) -> list[Any]:
            source = RolloutDataSourceWithBuffer(args)
            params = GenerateState(args).sampling_params
            before = copy.deepcopy(params)
            made = [await generate_and_rm_group(args, g, params, evaluation) for g in source.get_samples(num)]
            expect(params == before, "it changed the sampling parameters of other samples")
            return made

        for evaluation in (False, True):
            with findings.step(f"finished, graded samples come of it (evaluation={evaluation})"):
                made = findings.run(groups(2, evaluation), bench.timeout_s)
                if engine.num_requests == 0:
                    findings.warn("engine", "it never asked the engine at the router's address")
                expect(all(s.status != Sample.Status.ABORTED for s in leaf_samples(made)), "samples were left aborted")
                check_trainable(args, made)
        with findings.step("a short limit on the response is kept"):
            args.rollout_max_response_len = 4
            GenerateState.clear_instances()
            made = findings.run(groups(1, False), bench.timeout_s)
            longest = max(sum(s.loss_mask or [1] * s.response_length) for s in leaf_samples(made))
            if longest > 4:
                findings.warn("length", f"{longest} tokens were generated; --rollout-max-response-len was 4")
        with findings.step("an answer that the engine breaks off is handed back as aborted, or finished otherwise"):
            engine.is_aborting = True
            made = findings.run(groups(1, False), bench.timeout_s)
            for sample in leaf_samples(made):
                expect(sample.status != Sample.Status.PENDING, "the sample is still pending")
                if sample.status is Sample.Status.COMPLETED and sample.reward is not None:
                    findings.warn("abort", "it calls a broken-off answer completed; look at meta_info.finish_reason")
                    break


def _sample_hook(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    args = bench.args(flag, path, engine=False)
    for evaluation in (False, True):
        with findings.step(f"it keeps or replaces a sample (evaluation={evaluation})"):
            call = apply_rollout_sample_hooks(args, bench.sample(0), evaluation=evaluation, rollout_id=3)
            check_sample(args, findings.run(call, bench.timeout_s))
    with findings.step("an empty response does not trouble it"):
        findings.run(apply_rollout_sample_hooks(args, bench.sample(0, "")), bench.timeout_s)


def _custom_rm(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    args = bench.args(flag, path, "--rm-failure-policy", "raise", engine=False)
    samples = [bench.sample(i) for i in range(GROUP_SIZE)]
    odd = [bench.sample(i, text) for i, text in enumerate(ODD_RESPONSES)]

    async def one_by_one(graded: list[Sample]) -> list[Any]:
        return [await async_rm(args, sample) for sample in graded]

    if not args.group_rm:
        for what, graded in (("a reward for one sample", samples), ("odd responses are graded like others", odd)):
            with findings.step(what):
                for reward in findings.run(one_by_one(graded), bench.timeout_s):
                    check_reward(args, reward)
    if args.group_rm or asks_for_lists(args.custom_rm_path):
        what = "with --group-rm" if args.group_rm else "for what a generate function makes of one sample"
        with findings.step(f"a list of rewards for a list of samples ({what})"):
            rewards = findings.run(batched_async_rm(args, samples), bench.timeout_s)
            same = isinstance(rewards, list | tuple) and len(rewards) == len(samples)
            expect(same, f"for {len(samples)} samples it gave {str(rewards)[:100]}")
            for reward in rewards:
                check_reward(args, reward)


def _dynamic_filter(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    args = bench.args(flag, path, engine=False)
    function = load_function(path)
    for equal in (False, True):
        with findings.step("a verdict on a group whose rewards are " + ("equal" if equal else "different")):
            (group,) = bench.groups(args, 1, equal=equal)
            call_dynamic_filter(function, args, group)
    try:
        call_dynamic_filter(function, args, fanned_out(bench.groups(args, 1)[0]))
    except (AttributeError, TypeError) as error:
        findings.warn("fan-out", f"a group of lists of samples, as generate may give, makes it raise {error!r}")


def _buffer_filter(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    args = bench.args(flag, path, engine=False)
    function = load_function(path)
    for num_groups, wanted in ((3, 2), (1, 2), (2, 2)):
        with findings.step(f"it takes at most {wanted} of {num_groups} groups, out of the buffer"):
            buffer = bench.groups(args, num_groups)
            before = list(buffer)
            taken = function(args, None, buffer, wanted)
            expect(isinstance(taken, list) and len(taken) <= wanted, f"asked for {wanted} it gave {len(taken)}")
            left = {id(group) for group in buffer}
            expect(not any(id(group) in left for group in taken), "it left groups in the buffer that it returned")
            known = {id(group) for group in before}
            expect(all(id(group) in known for group in taken), "it returned groups that were not in the buffer")


def _sample_filter(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    args = bench.args(flag, path, engine=False)
    with findings.step("it marks samples and keeps the groups as they are"):
        groups = bench.groups(args, 2)
        shape = [len(group) for group in groups]
        load_function(path)(args, groups)
        expect([len(group) for group in groups] == shape, "it took samples out; set sample.remove_sample instead")
        expect(all(isinstance(s.remove_sample, bool) for s in leaf_samples(groups)), "remove_sample is no bool")
        check_trainable(args, groups)


def _all_samples_process(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    args = bench.args(flag, path, engine=False)
    with findings.step("it gets every group and the data source's get_samples"):
        load_function(path)(args, bench.groups(args, 3), RolloutDataSourceWithBuffer(args).get_samples)


def _reward_post_process(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    args = bench.args(flag, path, engine=False)
    for num_groups in (2, 1):
        with findings.step(f"raw and final rewards of {num_groups * GROUP_SIZE} samples"):
            samples = list(leaf_samples(bench.groups(args, num_groups)))
            raw, final = load_function(path)(args, samples)
            for name, values in (("raw rewards", raw), ("rewards", final)):
                expect(len(values) == len(samples), f"{len(values)} {name} for {len(samples)} samples")
                expect(all(math.isfinite(float(value)) for value in values), f"{name} are not finite: {values}")


def _convert(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    args = bench.args(flag, path, engine=False)
    with findings.step("the columns can be split among trainer ranks"):
        data = load_function(path)(args, list(leaf_samples(bench.groups(args, 2))))
        expect(isinstance(data, dict), f"it returned {type(data).__name__}, no dict")
        split_for_ranks(args, TrainBatch.from_dict(data), ONE_RANK)


def _rollout_log(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    args = bench.args(flag, path, engine=False)
    for metrics in (None, {"rollout/groups/kept": 2}):
        with findings.step(f"it logs a rollout whose metrics are {'absent' if metrics is None else 'a dict'}"):
            load_function(path)(0, args, list(leaf_samples(bench.groups(args, 2))), metrics, 1.5)


def _eval_log(findings: Findings, bench: Bench, flag: str, path: str) -> None:
    args = bench.args(flag, path, engine=False)
    samples = list(leaf_samples(bench.groups(args, 1)))
    data = {"sums": {"rewards": [1.0, 0.0, 1.0, 0.0], "truncated": [False] * 4, "samples": samples}}
    for metrics in (None, {"x": 1}):
        with findings.step(f"it logs an evaluation whose metrics are {'absent' if metrics is None else 'a dict'}"):
            load_function(path)(0, args, data, metrics)


CONTRACTS = {
    "--rollout-function-path": _rollout_function,
    "--eval-function-path": _eval_function,
    "--data-source-path": _data_source,
    "--custom-generate-function-path": _custom_generate,
    "--rollout-sample-hook-path": _sample_hook,
    "--custom-rm-path": _custom_rm,
    "--dynamic-sampling-filter-path": _dynamic_filter,
    "--buffer-filter-path": _buffer_filter,
    "--rollout-sample-filter-path": _sample_filter,
    "--rollout-all-samples-process-path": _all_samples_process,
    "--custom-reward-post-process-path": _reward_post_process,
    "--custom-convert-samples-to-train-data-path": _convert,
    "--custom-rollout-log-function-path": _rollout_log,
    "--custom-eval-rollout-log-function-path": _eval_log,
}
