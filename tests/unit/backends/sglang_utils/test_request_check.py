"""Requests that engines refuse, by SGLang's classes: none passes that a scheduler cannot read, and slime's own all
pass.  ``tests/ext/fast_push/test_engine_cpu.py`` sends the same requests to a real engine.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from slime.backends.sglang_utils import cpu_shim

cpu_shim.install()
from sglang.srt.managers import io_struct  # noqa: E402 - after the shim
from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: E402
from sglang.srt.managers.tokenizer_manager import TokenizerManager  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402

from slime.backends.sglang_utils.request_check import (  # noqa: E402
    MAX_TEXT_CHARS,
    UNREADABLE,
    check_request,
    check_sequence,
    check_text,
)
from slime.backends.sglang_utils.sglang_plugin import _abort, _check_template, _generate, _leave_a_token  # noqa: E402
from tests.unit.backends.sglang_utils.hostile_requests import IDS, PASSED, REQUESTS  # noqa: E402

VOCAB_SIZE = 132
GENERATE = {name: body for name, (path, body) in REQUESTS.items() if path == "/generate"}
FREE = {"max_new_tokens": 16, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop": None, "stop_token_ids": None,
        "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False}  # fmt: skip
OURS: dict[str, dict[str, Any]] = {
    "a rollout": {"input_ids": IDS, "sampling_params": FREE, "return_logprob": True, "rid": "f" * 32},
    "a rollout of experts": {"input_ids": IDS, "sampling_params": FREE, "return_routed_experts": True},
    "nuclei": {"input_ids": IDS, "sampling_params": FREE | {"custom_params": {"return_top_p_token_ids": True}}},
    "a teacher": {
        "input_ids": IDS, "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 100,
    },
    "pictures": {"input_ids": IDS, "sampling_params": FREE, "image_data": ["data:image/png;base64,AA", "iVBO", "/x"]},
    "a text": {"text": "a", "sampling_params": FREE | {"stop": ["</answer>", "\n"], "stop_token_ids": [5]}},
    "an adapter": {"input_ids": IDS, "sampling_params": FREE, "lora_path": "adapter"},
    "a batch": {"input_ids": [[5], [6, 7]], "sampling_params": [FREE, FREE], "return_logprob": True},
    "several answers": {"text": "a", "sampling_params": FREE | {"n": 4}},
}  # fmt: skip


def scheduled(body: dict[str, Any]) -> list[Any]:
    """The sequences that the scheduler would get; raises ValueError, or an error of SGLang's, if it would get none."""
    obj = GenerateReqInput(**body)
    check_request(obj)
    obj.normalize_batch_and_arguments()
    times = SimpleNamespace(set_tokenize_finish_time=lambda: None)
    manager: Any = SimpleNamespace(
        preferred_sampling_params=None,
        sampling_params_class=SamplingParams,
        tokenizer=SimpleNamespace(encode=lambda text, **_: [5] * len(text)),
        model_config=SimpleNamespace(vocab_size=VOCAB_SIZE, hf_config=SimpleNamespace(architectures=[])),
        server_args=SimpleNamespace(disaggregation_transfer_backend=None),
    )
    made = []
    for one in [obj] if obj.is_single else [obj[index] for index in range(obj.batch_size)]:
        manager.rid_to_state = {one.rid: SimpleNamespace(time_stats=times)}
        ids = [5] * len(one.text) if one.input_ids is None else one.input_ids
        TokenizerManager._validate_token_ids_logprob(manager, one)
        sequence = TokenizerManager._create_tokenized_object(manager, one, one.text, ids)
        sequence.time_stats = None
        check_sequence(sequence, VOCAB_SIZE)
        made.append(sequence)
    return made


def test_a_scheduler_gets_what_it_can_read_or_nothing() -> None:
    for name, body in GENERATE.items():
        try:
            made = scheduled(body)
        except (ValueError, *UNREADABLE):  # status 400
            assert name not in PASSED, name
            continue
        assert name in PASSED, name
        for sequence in made:
            read = io_struct.msgpack_decode(io_struct.msgpack_encode(sequence))
            assert all(0 <= token < VOCAB_SIZE for token in read.input_ids) and read.logprob_start_len >= -1, name


@pytest.mark.parametrize("name", OURS)
def test_what_slime_sends_passes_as_it_is(name: str) -> None:
    obj, same = GenerateReqInput(**OURS[name]), GenerateReqInput(**OURS[name])
    check_request(obj)
    assert obj == same
    assert scheduled(OURS[name])


def test_labels_of_metrics_are_those_that_the_server_knows() -> None:
    obj = GenerateReqInput(input_ids=IDS, custom_labels={"team": "a"})
    check_request(obj, labels=frozenset({"team"}))
    with pytest.raises(ValueError, match=r"custom_labels are \['team'\]; this engine knows \[\]"):
        check_request(obj)


def test_texts_of_all_doors_are_bounded() -> None:
    check_text(["a" * (MAX_TEXT_CHARS // 2)] * 2)
    with pytest.raises(ValueError, match="longer than 4000000 characters"):
        check_text(["a" * (MAX_TEXT_CHARS // 2), "a" * (MAX_TEXT_CHARS // 2), "a"])
    with pytest.raises(ValueError, match="no template from clients"):
        _check_template(None, [], chat_template="{{ 1 }}")


class Manager:
    """A tokenizer manager whose requests end as scripted."""

    def __init__(self, error: Exception | None = None) -> None:
        self.server_args = SimpleNamespace(
            host="h", port=1, enable_mis=False, enable_lora=False, tokenizer_metrics_allowed_custom_labels=None
        )
        self.error, self.seen, self.aborted, self.rid_to_state = error, [], [], {}

    async def answer(self, obj: Any, request: Any) -> Any:
        self.seen.append(obj.rid)
        if self.error is not None:
            raise self.error
        for rid in obj.rid if isinstance(obj.rid, list) else [obj.rid]:
            yield {"meta_info": {"id": rid}}


def asked(manager: Manager, obj: Any, path: str = "/generate") -> list[str]:
    async def ask() -> list[str]:
        request = SimpleNamespace(url=SimpleNamespace(path=path))
        return [one["meta_info"]["id"] async for one in _generate(Manager.answer, manager, obj, request)]

    return asyncio.run(ask())


@pytest.mark.parametrize("kind", ["image_data", "video_data", "audio_data"])
@pytest.mark.parametrize("data", [{"format": "processor_output"}, [["x"], [{"format": "precomputed_embedding"}]]])
def test_a_request_with_features_is_refused_by_name(kind: str, data: Any) -> None:
    manager = Manager()
    batch = [[5], [6]] if isinstance(data, list) else IDS
    asked(manager, GenerateReqInput(input_ids=IDS, **{kind: [["x", {"url": "y"}]]}))
    with pytest.raises(ValueError, match="brings 'p[a-z_]*' in the place of an image.*`encoder` groups"):
        asked(manager, GenerateReqInput(input_ids=batch, **{kind: data}))
    assert len(manager.seen) == 1  # SGLang saw only the first


def test_two_requests_with_one_id_have_two_in_the_scheduler_and_are_aborted_by_the_clients() -> None:
    manager = Manager()
    for rid in ("mine", "mine", ["mine", "yours"]):
        ids = [[5], [6]] if isinstance(rid, list) else IDS
        given = asked(manager, GenerateReqInput(input_ids=ids, rid=rid))  # type: ignore[arg-type]
        assert given == (rid if isinstance(rid, list) else [rid])
    inner = [rid for seen in manager.seen for rid in (seen if isinstance(seen, list) else [seen])]
    assert len(set(inner)) == 4
    manager.rid_to_state = dict.fromkeys([*inner, "mine2_x"])

    def abort(manager: Manager, rid: str, abort_all: bool) -> None:
        manager.aborted.append((rid, abort_all))

    _abort(abort, manager, "mine")
    assert manager.aborted == [(inner[0], False), (inner[1], False), (inner[2], False)]
    manager.aborted.clear()
    for rid, abort_all in (("", True), (inner[0], False), ("nobody", False)):
        _abort(abort, manager, rid, abort_all)
    assert manager.aborted == [("", True), (inner[0], False), ("nobody", False)]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TypeError("unhashable"), ValueError),
        (KeyError("x"), ValueError),
        (RuntimeError("An exception occurred while loading IMAGE data at index 0"), ValueError),
        (RuntimeError("CUDA error"), RuntimeError),
    ],
)
def test_what_sglang_cannot_read_is_an_error_of_the_client(error: Exception, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=str(error).strip("'")):
        asked(Manager(error), GenerateReqInput(input_ids=IDS))


def test_a_grammar_that_allows_nothing_leaves_something_to_draw_from() -> None:
    import torch

    logits = torch.tensor([[-torch.inf, -torch.inf], [-torch.inf, 1.0]])
    _leave_a_token(None, SimpleNamespace(vocab_mask=None), logits)
    assert logits[0].isinf().all()
    _leave_a_token(None, SimpleNamespace(vocab_mask=logits), logits)
    assert logits.tolist() == [[0.0, 0.0], [-torch.inf, 1.0]]
