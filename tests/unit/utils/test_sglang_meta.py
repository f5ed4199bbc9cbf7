"""The fast decoder of ``/generate`` answers gives the same result as ordinary decoding."""

import base64
import json

import pytest
import torch

from slime.utils.sglang_meta import (
    SHARED_IDS,
    TokenLogProbs,
    decode_generate_answer,
    decode_int32_meta_array,
    share_ids,
)


def answer(entries, *, text="hello", **more):
    ids = [entry[1] for entry in entries if len(entry) > 1]
    meta = {"id": "a", "finish_reason": {"type": "stop"}, **more, "output_token_logprobs": entries, "cached_tokens": 3}
    return {"text": text, "output_ids": ids, "meta_info": meta}


def compact(value):
    return json.dumps(value, separators=(",", ":")).encode()


ENTRIES = [[-0.25, 7, None], [-0.0, 151000, None], [-1e-9, SHARED_IDS + 5, None]]


def test_the_fast_way_is_taken_where_it_can_be_and_slices_stay_columns():
    columns = decode_generate_answer(compact(answer(ENTRIES)))["meta_info"]["output_token_logprobs"]
    assert isinstance(columns, TokenLogProbs)
    assert columns[1:] == ENTRIES[1:] and columns[-1] == ENTRIES[-1]


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(answer(ENTRIES)).encode(),  # spaces between values
        compact(answer([[-0.5, 7, "],["], [-0.5, 8, "b"]])),
        compact(answer([[-0.5, 7, None, 1], [-0.5, 8, None, 2]])),
        compact(answer([[-0.5, 7, None], [-0.5]])),
        compact(answer([[-0.5, 7.5, None], [-0.5, 8, None]])),
        compact(answer([[-0.5, None, None], [-0.5, 8, None]])),
        compact([answer(ENTRIES)]),
        compact({"text": "", "output_token_logprobs": [[-0.5, 7, None]]}),
    ],
)
def test_everything_else_is_decoded_as_json_is(body):
    assert decode_generate_answer(body) == json.loads(body)


def test_marks_inside_the_text_are_text():
    text = '"output_ids":[1],"output_token_logprobs":[[-9.0,1,null]] \\'
    decoded = decode_generate_answer(compact(answer(ENTRIES, text=text)))
    assert decoded["text"] == text
    assert list(decoded["meta_info"]["output_token_logprobs"]) == ENTRIES


def test_shared_ids_are_equal_and_the_same_object():
    ids = [int(text) for text in ("1000", "200000", "1000")]
    shared = share_ids(ids)
    assert shared == ids and shared[0] is shared[2] is share_ids([1000, 2])[0]
    assert share_ids([-1, 5]) == [-1, 5] and share_ids([SHARED_IDS, 5]) == [SHARED_IDS, 5] and share_ids([9]) == [9]


def test_integer_arrays_of_an_answer_are_flat_int32_tensors():
    raw = torch.tensor([3, -1, 2**31 - 1], dtype=torch.int32)
    encoded = base64.b64encode(raw.numpy().tobytes()).decode()
    for value in (encoded, raw.numpy().tobytes(), raw.tolist(), raw.numpy(), raw.reshape(3, 1)):
        found = decode_int32_meta_array({"first": None, "second": value}, ["first", "second"])
        assert isinstance(found, torch.Tensor) and found.dtype == torch.int32
        assert found.tolist() == raw.tolist()
    assert decode_int32_meta_array({}, "first") is None
