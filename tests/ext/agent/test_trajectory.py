"""Turns -> samples, by hand-written ids."""

from __future__ import annotations

from argparse import Namespace

import pytest

from slime.agent.trajectory import TrajectoryManager, TurnRecord
from slime.utils.errors import DataError
from slime.utils.types import Sample

BASE = Sample(index=4, group_index=2, prompt="p", label="l", rollout_id=0)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def turn(prompt, output, **more):
    return TurnRecord(prompt_ids=prompt, output_ids=output, output_log_probs=[-0.1 * t for t in output], **more)


def record(manager, said, answer, prompt, output, sid="s", **more):
    facts = {key: more.pop(key, None) for key in ("metadata", "tools")}
    manager.record_turn(sid, turn=turn(prompt, output, **more), prompt_messages=said, response_message=answer, **facts)


def test_a_prompt_that_repeats_the_ids_goes_on_in_the_same_sample():
    manager = TrajectoryManager()
    record(manager, [user("a")], assistant("b"), [1, 2], [3, 4])
    record(manager, [user("a"), assistant("b"), user("c")], assistant("d"), [1, 2, 3, 4, 5, 6], [7])
    assert (manager.has_session("s"), manager.turn_count("s")) == (True, 2)
    (sample,) = manager.get_trajectory("s", base_sample=BASE, reward=1.0)
    assert sample.tokens == [1, 2, 3, 4, 5, 6, 7]
    assert sample.loss_mask == [1, 1, 0, 0, 1]
    assert sample.rollout_log_probs == pytest.approx([-0.3, -0.4, 0.0, 0.0, -0.7])
    assert (sample.index, sample.group_index, sample.rollout_id, sample.reward) == (4, 2, 0, 1.0)


def test_a_small_rewriting_cuts_the_chain_back_and_a_large_one_forks():
    said = [user("a"), assistant("b"), user("c")]
    for threshold, expected in ((2, 1), (1, 2), (0, 2)):
        manager = TrajectoryManager(fork_threshold_tokens=threshold)
        record(manager, [user("a")], assistant("b"), [1, 2], [3, 4, 5])
        record(manager, said, assistant("d"), [1, 2, 3, 9, 9], [7])
        samples = manager.get_trajectory("s", base_sample=BASE)
        assert len(samples) == expected
        trained = [
            [t for t, on in zip(s.tokens[-s.response_length :], s.loss_mask, strict=True) if on] for s in samples
        ]
        assert trained == ([[3, 7]] if expected == 1 else [[3, 4, 5], [7]])
        assert samples[-1].tokens == [1, 2, 3, 9, 9, 7]


def meta(first_expert, num_rows, drawn):
    spans = [choice for token in drawn for choice in (token, 100 + token)]
    return {
        "routed_experts": list(range(first_expert, first_expert + num_rows)),
        "top_p_token_ids": spans,
        "top_p_token_offsets": list(range(0, len(spans) + 1, 2)),
    }


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_a_chain_that_is_cut_back_keeps_experts_and_nuclei_of_what_is_left(max_tokens):
    manager = TrajectoryManager(args=Namespace(num_layers=1, moe_router_topk=1))
    record(manager, [user("a")], assistant("b"), [1, 2], [3, 4, 5], meta_infos=[meta(10, 4, [3, 4, 5])])
    said = [user("a"), assistant("b"), user("c")]
    record(manager, said, assistant("d"), [1, 2, 3, 9, 9], [7], meta_infos=[meta(20, 5, [7])])
    (sample,) = manager.get_trajectory("s", base_sample=BASE, max_sample_tokens=max_tokens)
    assert sample.tokens == [1, 2, 3, 9, 9, 7][: max_tokens or None]
    assert sample.rollout_routed_experts.flatten().tolist() == [20, 21, 22, 23, 24][: len(sample.tokens) - 1]
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 2, 2, 2, 4][: sample.response_length + 1]
    assert sample.rollout_top_p_token_ids.tolist() == [3, 103, 7, 107][: 2 if max_tokens else 4]
    assert sample.metadata["truncated"] is bool(max_tokens)


def test_two_conversations_of_one_session_do_not_mix():
    manager = TrajectoryManager()
    record(manager, [user("a")], assistant("b"), [1, 2], [3])
    record(manager, [user("title?")], assistant("T"), [1, 5], [6])
    record(manager, [user("a"), assistant("b"), user("c")], assistant("d"), [1, 2, 3, 4], [7])
    samples = manager.get_trajectory("s", base_sample=BASE)
    assert [s.tokens for s in samples] == [[1, 2, 3, 4, 7], [1, 5, 6]]


def test_every_drawn_token_is_trained_exactly_once_when_a_turn_is_played_again():
    manager = TrajectoryManager()
    record(manager, [user("a")], assistant("b"), [1], [2])
    said = [user("a"), assistant("b"), user("c")]
    record(manager, said, assistant("d"), [1, 2, 3], [4])
    record(manager, said, assistant("e"), [1, 2, 3], [5])
    samples = manager.get_trajectory("s", base_sample=BASE)
    assert [(s.tokens, s.loss_mask) for s in samples] == [([1, 2, 3, 4], [1, 0, 1]), ([1, 2, 3, 5], [1])]


def test_the_longest_known_beginning_is_found_without_its_reasoning():
    manager = TrajectoryManager()
    record(manager, [user("a")], assistant("b", reasoning_content="because"), [1], [2])
    known = manager.known_prefix("s", [user("a"), assistant(" b\n"), user("c")])
    assert (known.ids, known.messages[-1]["reasoning_content"]) == ([1, 2], "because")
    assert manager.known_prefix("s", [user("x"), assistant("b")]) is None
    assert manager.known_prefix("other", [user("a")]) is None


def test_a_beginning_is_known_with_the_same_tools_alone_in_any_order():
    read, write = {"function": {"name": "read"}}, {"function": {"name": "write"}}
    manager = TrajectoryManager()
    record(manager, [user("a")], assistant("b", reasoning_content="because"), [1], [2], tools=[read, write])
    said = [user("a"), assistant("b"), user("c")]
    assert manager.known_prefix("s", said, [write, read]).ids == [1, 2]
    assert manager.known_prefix("s", said, [read]) is manager.known_prefix("s", said) is None
    assert manager.with_reasoning("s", said, [read])[1]["reasoning_content"] == "because"
    record(manager, said, assistant("d"), [7, 2, 3], [4], tools=[read])
    record(manager, [*said, assistant("d")], assistant("e"), [1, 2, 3, 4], [5], tools=[read, write])
    samples = manager.get_trajectory("s", base_sample=BASE)
    assert [(s.tokens, s.loss_mask) for s in samples] == [([1, 2, 3, 4, 5], [1, 0, 0, 1]), ([7, 2, 3, 4], [1])]


def test_facts_about_turns_reach_the_metadata():
    manager = TrajectoryManager()
    facts = {"use_tool": True, "ill_formed": True}
    record(manager, [user("a")], assistant("b"), [1], [2], finish_reason="length", metadata=facts)
    (sample,) = manager.get_trajectory("s", base_sample=BASE, extra_metadata={"task": 1})
    expected = {"task": 1, "truncated": True, "use_tool": True, "ill_formed": True, "num_turns": 1}
    assert {key: sample.metadata[key] for key in expected} == expected
    assert sample.status is Sample.Status.COMPLETED


def test_only_the_newest_weights_are_trained_on_request():
    manager = TrajectoryManager()
    record(manager, [user("a")], assistant("b"), [1], [2, 3, 4], weight_spans=[("7", 2), ("8", 1)])
    (sample,) = manager.get_trajectory("s", base_sample=BASE, mask_off_policy=True)
    assert (sample.loss_mask, sample.weight_versions) == ([0, 0, 1], ["7", "8"])
    assert sample.metadata["weight_spans"] == [("7", 0, 2), ("8", 2, 3)]


def test_a_turn_whose_parts_do_not_fit_is_refused():
    assert TurnRecord([1], [2], [0.0], "length").finish_reason == "length"
    with pytest.raises(DataError, match="2 log-probs for 1"):
        TurnRecord([1], [2], [0.0, 0.0])
    with pytest.raises(DataError, match="do not cover"):
        turn([1], [2], weight_spans=[("1", 5)])
