"""Custom generate functions: turns of model and tool in one sample, two styles, and a fan-out into several samples."""

import copy
import time

from slime.observability.trace_utils import trace_event, trace_span
from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.utils.http_utils import post
from slime.utils.misc import load_function
from slime.utils.types import Sample

from .tool import find_call, observation, run_calculator


def prompt_text(sample, tokenizer):
    if isinstance(sample.prompt, str):
        return sample.prompt
    return tokenizer.apply_chat_template(
        sample.prompt, tokenize=False, add_generation_prompt=True, **(sample.apply_chat_template_kwargs or {})
    )


async def generate(args, sample, sampling_params):
    """Multi-turn with a calculator; ``append_response_tokens`` does the bookkeeping."""
    state = GenerateState(args)
    url = get_model_url(args, "default")
    tokenizer = state.tokenizer
    max_turns = getattr(args, "calc_max_turns", 3)

    prompt_ids = tokenizer(prompt_text(sample, tokenizer), add_special_tokens=False)["input_ids"]
    if not sample.tokens:
        sample.tokens = list(prompt_ids)
    budget = sampling_params["max_new_tokens"]
    if args.rollout_max_context_len is not None:
        budget = min(budget, args.rollout_max_context_len - len(sample.tokens))
    sample.tool_iters = 0

    for turn in range(max_turns):
        remaining = budget - sample.response_length
        if remaining <= 0:
            sample.status = Sample.Status.TRUNCATED
            break
        params = dict(sampling_params)
        params["max_new_tokens"] = remaining
        headers = None
        if args.router_policy == "consistent_hashing" and sample.session_id:
            headers = {"X-SMG-Routing-Key": sample.session_id}
        with trace_span(sample, "calculator_turn", attrs={"turn": turn}) as span:
            output = await post(
                url,
                {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True},
                headers=headers,
            )
            span.update({"finish": output["meta_info"]["finish_reason"]["type"]})
        meta = output["meta_info"]
        pairs = meta.get("output_token_logprobs") or []
        sample.append_response_tokens(
            args,
            tokens=[item[1] for item in pairs],
            log_probs=[item[0] for item in pairs],
            trainable=True,
            meta_info=meta,
            text=output["text"],
        )
        if meta["finish_reason"]["type"] in ("abort", "length"):
            break
        expression = find_call(output["text"])
        if expression is None or turn == max_turns - 1:
            break

        started = time.monotonic()
        result = await run_calculator(expression)
        sample.non_generation_time += time.monotonic() - started
        sample.tool_iters += 1
        trace_event(sample, "calculator_result", attrs={"result": result})
        text = observation(result)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = ids[: getattr(args, "calc_max_observation_tokens", 32)]
        sample.append_response_tokens(args, tokens=ids, trainable=False, text=text, update_terminal_info=False)

    sample.metadata["calls"] = sample.tool_iters
    return sample


async def generate_by_hand(args, sample, sampling_params, evaluation=False):
    """The same in the older style: parallel lists kept by the plug-in, the old router address, reward set inside."""
    assert not args.partial_rollout, "generate_by_hand does not continue partial samples"
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(prompt_text(sample, state.tokenizer), add_special_tokens=False)["input_ids"]

    response, response_ids, loss_mask, log_probs = "", [], [], []
    calls = 0
    finish = None
    for turn in range(args.calc_max_turns):
        payload = {
            "input_ids": prompt_ids + response_ids,
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        output = await post(url, payload)
        finish = output["meta_info"]["finish_reason"]["type"]
        if finish == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        new = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
        response += output["text"]
        response_ids += new
        loss_mask += [1] * len(new)
        log_probs += [item[0] for item in output["meta_info"]["output_token_logprobs"]]
        expression = find_call(output["text"])
        if finish == "length" or expression is None or turn == args.calc_max_turns - 1:
            break
        calls += 1
        text = observation(await run_calculator(expression))
        ids = state.tokenizer(text, add_special_tokens=False)["input_ids"]
        response += text
        response_ids += ids
        loss_mask += [0] * len(ids)
        log_probs += [0.0] * len(ids)

    sample.tokens = prompt_ids + response_ids
    sample.response = response
    sample.response_length = len(response_ids)
    sample.loss_mask = loss_mask
    sample.rollout_log_probs = log_probs
    sample.status = Sample.Status.TRUNCATED if finish == "length" else Sample.Status.COMPLETED
    sample.metadata["calls"] = calls
    sample.metadata["evaluation"] = evaluation
    sample.train_metadata = {"calls": calls}
    sample.reward = float(str(sample.label) in response) + 0.5 * calls  # so the reward model is not called
    return sample


async def solve_once(args, role):
    """One agent of the pair; `args` is this agent's own deep copy and carries what it needs."""
    output = await post(
        f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate",
        {
            "input_ids": args.tokenizer(f"{role}: {args.question}", add_special_tokens=False)["input_ids"],
            "sampling_params": args.sampling_params,
            "return_logprob": True,
        },
    )
    ids = args.tokenizer(f"{role}: {args.question}", add_special_tokens=False)["input_ids"]
    sample = copy.deepcopy(args.sample)
    pairs = output["meta_info"]["output_token_logprobs"]
    sample.tokens = ids + [item[1] for item in pairs]
    sample.response = output["text"]
    sample.response_length = len(pairs)
    sample.rollout_log_probs = [item[0] for item in pairs]
    sample.loss_mask = [1] * len(pairs)
    kinds = {"length": Sample.Status.TRUNCATED, "abort": Sample.Status.ABORTED}
    sample.status = kinds.get(output["meta_info"]["finish_reason"]["type"], Sample.Status.COMPLETED)
    sample.source = role
    args.results_dict[role] = len(pairs)
    return sample


async def generate_two_agents(args, sample, sampling_params, evaluation=False):
    """Fan-out: two agents answer one prompt; both answers are trained, together counting as one rollout.

    Settings and helpers are set on the shared args and each agent works on a deep copy, as slime's multi-agent
    example does.
    """
    args.sampling_params = sampling_params
    args.tokenizer = GenerateState(args).tokenizer
    args.calc_agents = ["solver", "critic"]
    solve = load_function("calculator_plugin.generate.solve_once")

    samples = []
    for role in args.calc_agents:
        own = copy.deepcopy(args)
        own.sample = sample
        own.question = sample.prompt
        own.results_dict = {}
        answer = await solve(own, role)
        answer.rollout_id = sample.rollout_id if sample.rollout_id is not None else sample.index
        answer.metadata["response_tokens"] = own.results_dict[role]
        samples.append(answer)
    return samples
