"""Requests that crash an engine of SGLang 0.5.15, and similar ones: each is refused or answered.

``REQUESTS`` maps name -> (path, body); ``RAW`` has bodies that are not a JSON object.
"""

from __future__ import annotations

from typing import Any

from examples.vision_shapes.model import IMAGE_ID, START_ID, STOP_ID

Body = dict[str, Any]

IDS = [5, 6, 7]
LONG, DEEP = 10**30, "[" * 20_000
PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5E"
    "rkJggg=="
)
NAN = float("nan")
INFINITE = float("inf")
TREE = '{"type":"array","minItems":100,"maxItems":100,"items":' * 6 + '{"type":"integer"}' + "}" * 6
ODD = {
    "a text": "x", "a list": [1], "nested lists": [[[]]], "an object": {"a": 1}, "true": True, "a fraction": 1.5,
    "negative": -1, "int64": 2**63, "uint64": 2**64, "a giant": LONG, "nan": NAN, "infinite": INFINITE,
}  # fmt: skip


def _ids(**fields: Any) -> Body:
    return {"input_ids": IDS, "sampling_params": {"max_new_tokens": 4}} | fields


def _seen(**fields: Any) -> Body:
    """The fields with an image placeholder in the prompt of the tiny vision model."""
    return _ids(input_ids=[START_ID, IMAGE_ID, STOP_ID, 5]) | fields


def _params(**fields: Any) -> Body:
    return {"input_ids": IDS, "sampling_params": {"max_new_tokens": 4} | fields}


def _logprob(**fields: Any) -> Body:
    return _ids(return_logprob=True) | fields


_FIELDS: dict[str, Body] = {
    "a token beyond the vocabulary": _ids(input_ids=[5, 10**9]),
    "a negative token": _ids(input_ids=[5, -1]),
    "a token that is a text": _ids(input_ids=[5, "6"]),
    "a token that is true": _ids(input_ids=[5, True]),
    "no tokens": _ids(input_ids=[]),
    "an empty prompt among others": _ids(input_ids=[[5], []]),
    "a batch with a token beyond the vocabulary": _ids(input_ids=[[5, 6], [10**9]]),
    "a batch and a token": _ids(input_ids=[[5], 6]),
    "an empty text": {"text": "", "sampling_params": {"max_new_tokens": 4}},
    "a text that is a number": {"text": 5, "sampling_params": {"max_new_tokens": 4}},
    "half a surrogate pair": {"text": "\ud800", "sampling_params": {"max_new_tokens": 4}},
    "a very long text": {"text": "a " * 2_500_000, "sampling_params": {"max_new_tokens": 4}},
    "text and tokens": _ids(text="a"),
    "nothing": {},
    "embeddings": {"input_embeds": [[0.1, 0.2]], "sampling_params": {"max_new_tokens": 4}},
    "replaced embeddings": _ids(positional_embed_overrides={"embeds": [[0.1]], "positions": [0]}),
    "a prompt that is too long": _ids(input_ids=[5] * 100_000),
    "too many prompts": _ids(input_ids=[[5]] * 5000),
    "a rid that is a number": _ids(rid=5),
    "a rid in a list": _ids(rid=["abcdefgh"]),
    "a rid twice": _ids(input_ids=[[5], [6]], rid=["abcdefgh", "abcdefgh"]),
    "a long rid": _ids(rid="r" * 100_000),
    "a rid of health": _ids(rid="HEALTH_CHECK_1"),
    "a stream in a batch": _ids(input_ids=[[5], [6]], stream=True),
    "an adapter nobody loaded": _ids(lora_path="nobody"),
    "no adapter once for two": _ids(input_ids=[[5], [6]], lora_path=[None]),
    "an adapter's inner id": _ids(lora_id="nobody"),
    "a processor of logits in a list": _ids(custom_logit_processor=["x"]),
    "a session": _ids(session_params={"id": "nobody"}),
    "the socket of another process": _ids(http_worker_ipc="ipc:///tmp/nobody"),
    "labels of metrics": _ids(custom_labels={"a": "b"}),
    "a time that is no number": _ids(received_time=NAN),
    "an encoder of somebody else": _ids(encoder_urls=["http://127.0.0.1:1"], need_wait_for_mm_inputs=True),
    "places of items": _ids(multi_item_delimiter_indices=[1]),
    "experts": _ids(return_routed_experts=True),
    "experts from behind the prompt": _ids(return_routed_experts=True, routed_experts_start_len=10**9),
    "experts from a negative place": _ids(return_routed_experts=True, routed_experts_start_len=-5),
    "hidden states": _ids(return_hidden_states=True),
    "bytes": _ids(return_bytes=True),
    "a port of prefill": _ids(bootstrap_host="127.0.0.1", bootstrap_port=2**40, bootstrap_room=1),
    "a negative room": _ids(bootstrap_room=-1),
    "parameters in a list": _ids(sampling_params=[{"max_new_tokens": 4}]),
    "parameters for another batch": _ids(input_ids=[[5], [6]], sampling_params=[{"max_new_tokens": 4}]),
    "parameters that are a text": _ids(sampling_params="x"),
    "different n": _ids(input_ids=[[5], [6]], sampling_params=[{"n": 1}, {"n": 2}]),
    "n of a million": _params(n=10**6),
    "n and a batch of a thousand": _ids(input_ids=[[5]] * 1000, sampling_params={"n": 100, "max_new_tokens": 1}),
    "an unknown parameter": _params(nothing=1),
    "parameters that claim to be checked": _params(is_normalized=True, temperature=0),
    "an inner length of stops": _params(stop_str_max_len="x"),
    "top_k of int64": _params(top_k=2**63),
    "top_k below -1": _params(top_k=-5),
    "a giant temperature": _params(temperature=1e308),
    "the smallest temperature": _params(temperature=1e-6),
    "a penalty of nearly nothing": _params(repetition_penalty=1e-300),
    "a penalty that is no number": _params(repetition_penalty=NAN),
    "stop of lists": _params(stop=[["a"]]),
    "a hundred thousand stops": _params(stop=["a"] * 100_000),
    "an expression as a stop": _params(stop_regex="(a+)+$", max_new_tokens=32),
    "a stop token beyond the vocabulary": _params(stop_token_ids=[10**9], min_new_tokens=2),
    "many stop tokens": _params(stop_token_ids=list(range(100_000))),
    "many tokens at least": _params(min_new_tokens=10**9, max_new_tokens=10**9),
    "many tokens at most": _params(max_new_tokens=2**62),
    "no tokens at most": _params(max_new_tokens=0),
    "a bias of a token beyond the vocabulary": _params(logit_bias={"1000000000": 1}),
    "a bias that is no number": _params(logit_bias={"5": NAN}),
    "a bias of lists": _params(logit_bias=[[5, 1]]),
    "many biases": _params(logit_bias={str(token): 1 for token in range(100_000)}),
    "a seed beyond int64": _params(sampling_seed=2**63),
    "an interval of nothing": _params(stream_interval=0),
    "parameters of one's own": _params(custom_params={"a": {"b": {"c": 1}}}),
    "nuclei": _params(custom_params={"return_top_p_token_ids": "yes"}, top_p=0.5),
    "nuclei of a greedy request": _params(custom_params={"return_top_p_token_ids": True}, temperature=0),
    "an expression": _params(regex="[a-z]+"),
    "a broken expression": _params(regex="(["),
    "an expression that repeats": _params(regex="((((a{1,1000}){1,1000}){1,1000}){1,1000})"),
    "a deep expression": _params(regex="(" * 5000 + "a" + ")" * 5000),
    "a schema": _params(json_schema='{"type": "object"}'),
    "a schema that is no JSON": _params(json_schema="{"),
    "a schema that refers to itself": _params(json_schema='{"$ref": "#"}'),
    "a schema that multiplies": _params(json_schema=TREE),
    "a rule that begins with itself": _params(ebnf='root ::= root "a"'),
    "a tag that is no JSON": _params(structural_tag="x"),
    "a tag of odd types": _params(structural_tag='{"structures": 5, "triggers": [1]}'),
    "log-probs from a negative place": _logprob(logprob_start_len=-5),
    "log-probs from behind the prompt": _logprob(logprob_start_len=100),
    "log-probs of nothing drawn": _logprob(logprob_start_len=0, sampling_params={"max_new_tokens": 0}),
    "a log-prob for two": _ids(input_ids=[[5], [6]], return_logprob=[True]),
    "likeliest tokens beyond the vocabulary": _logprob(top_logprobs_num=10**6),
    "log-probs of a token beyond the vocabulary": _logprob(token_ids_logprob=[10**9]),
    "log-probs of many tokens": _logprob(token_ids_logprob=[5] * 100_000),
    "a picture": _seen(image_data=PICTURE),
    "a picture that is none": _seen(image_data="data:image/png;base64,AAAA"),
    "a file as a picture": _seen(image_data="/etc/passwd"),
    "a device as a picture": _seen(image_data="file:///dev/zero"),
    "features as a picture": _ids(image_data={"format": "precomputed_embedding", "feature": [[0.1]]}),
    "pictures for another batch": _ids(input_ids=[[5], [6]], image_data=[PICTURE]),
    "more pictures than places": _seen(image_data=[PICTURE, PICTURE]),
    "a place without a picture": _seen(),
    "a video": _ids(video_data="data:video/mp4;base64,AAAA"),
    "a sound": _ids(audio_data="data:audio/wav;base64,AAAA"),
}
_VARIED = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "min_new_tokens", "max_new_tokens", "n", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "no_stop_trim", "logit_bias", "sampling_seed", "json_schema", "custom_params",
    "stream_interval",
)  # fmt: skip
_CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
_TEMPLATE = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
_CHATS: dict[str, Body] = {
    "a chat": {},
    "a template of a client's own": {"chat_template_kwargs": {"chat_template": _TEMPLATE}},
    "odd arguments of a template": {"chat_template_kwargs": {"tokenize": True}},
    "no messages": {"messages": []},
    "a chat about a file": {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}]
    },
    "a long message": {"messages": [{"role": "user", "content": "a " * 2_500_000}]},
    "many answers": {"n": 10**6},
    "many likeliest tokens": {"logprobs": True, "top_logprobs": 10**7},
    "a chat's bias": {"logit_bias": {"1000000000": 1}},
    "a chat's expression as a stop": {"stop_regex": "(a+)+$"},
    "a chat's top_k": {"top_k": 2**40},
    "a chat's adapter": {"lora_path": "nobody"},
    "a chat's session": {"session_params": {"id": "x", "replace": True}},
    "a chat's rid": {"rid": ["a", "b"]},
    "a chat's grammar": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
    "a chat's expression": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "a tool that must be used": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}],
        "tool_choice": "required",
    },
    "a tool nobody offered": {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    "a chat's stream": {"stream": True},
    "a refused stream": {"stream": True, "top_k": 2**40},
    "a chat's experts": {"return_routed_experts": True},
}
_DOORS: dict[str, tuple[str, Body]] = {
    "a completion": ("/v1/completions", {"model": "m", "prompt": "a", "max_tokens": 2}),
    "a completion of an odd token": ("/v1/completions", {"model": "m", "prompt": [5, 10**9], "max_tokens": 2}),
    "a completion of nothing": ("/v1/completions", {"model": "m", "prompt": [], "max_tokens": 2}),
    "a completion of many": ("/v1/completions", {"model": "m", "prompt": ["a"] * 5000, "max_tokens": 2}),
    "a completion with likeliest tokens": (
        "/v1/completions",
        {"model": "m", "prompt": "a", "logprobs": 10**8, "max_tokens": 2, "echo": True},
    ),
    "an embedding": ("/v1/embeddings", {"model": "m", "input": "a"}),
    "an embedding of odd tokens": ("/v1/embeddings", {"model": "m", "input": [[-1]]}),
    "an encoding": ("/encode", {"input_ids": [5]}),
    "an encoding of odd tokens": ("/encode", {"input_ids": [[10**9]], "rid": "x"}),
    "a class": ("/classify", {"text": ["a"], "sampling_params": []}),
    "a class of OpenAI's": ("/v1/classify", {"model": "m", "input": ["a"]}),
    "a ranking": ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    "a score": ("/v1/score", {"model": "m", "query": "a", "items": ["b"], "label_token_ids": [5]}),
    "a score of an odd token": ("/v1/score", {"model": "m", "query": "a", "items": ["b"], "label_token_ids": [-5]}),
    "a score of embeddings": (
        "/v1/score",
        {
            "model": "m", "query": [5], "items": [[6]], "label_token_ids": [5], "embed_override_token_id": 5,
            "query_embed_overrides": [[0.1]],
        },
    ),
    "a response": ("/v1/responses", {"model": "m", "input": "a", "max_output_tokens": 2}),
    "a response in the background": (
        "/v1/responses",
        {"model": "m", "input": "a", "background": True, "top_k": 2**40},
    ),
    "a response's top_k": ("/v1/responses", {"model": "m", "input": "a", "max_output_tokens": 2, "top_k": 2**63}),
    "a message": (
        "/v1/messages",
        {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    ),
    "a message's top_k": (
        "/v1/messages",
        {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "top_k": 2**63},
    ),
    "the tokens of a message": (
        "/v1/messages/count_tokens",
        {"model": "m", "messages": [{"role": "user", "content": "a " * 2_500_000}]},
    ),
    "a chat of ollama's": (
        "/api/chat",
        {
            "model": "m", "stream": False, "messages": [{"role": "user", "content": "a"}],
            "options": {"top_k": 2**40, "num_predict": 2},
        },
    ),
    "a model of ollama's": ("/api/show", {"model": "m"}),
    "a generation of vertex": ("/vertex_generate", {"instances": [{"input_ids": [10**9]}]}),
    "an inner field of vertex": (
        "/vertex_generate",
        {"instances": [{"input_ids": [5]}], "parameters": {"lora_id": "nobody"}},
    ),
    "invocations": ("/invocations", _CHAT | {"top_k": 2**63}),
    "tokens of a long text": ("/tokenize", {"model": "m", "prompt": "a " * 2_500_000}),
    "the text of odd tokens": ("/detokenize", {"model": "m", "tokens": [-1, 2**70]}),
    "a session of SGLang's": ("/open_session", {"capacity_of_str_len": 2**70, "session_id": "a"}),
    "a call of a function": (
        "/parse_function_call",
        {"text": "<tool_call>" * 20_000, "tools": [], "tool_call_parser": "qwen25"},
    ),
    "a reasoning": ("/separate_reasoning", {"text": "<think>" * 20_000, "reasoning_parser": "nobody"}),
}  # fmt: skip

REQUESTS: dict[str, tuple[str, Body]] = (
    {name: ("/generate", body) for name, body in _FIELDS.items()}
    | {
        f"{field} is {name}": ("/generate", _params(**{field: value}))
        for field in _VARIED
        for name, value in ODD.items()
    }
    | {name: ("/v1/chat/completions", _CHAT | fields) for name, fields in _CHATS.items()}
    | _DOORS
)
RAW: dict[str, bytes] = {
    "nothing": b"",
    "a deep list": DEEP.encode(),
    "a deep list of tokens": b'{"input_ids": ' + DEEP.encode(),
    "a list": b"[]",
    "a giant number": b'{"input_ids": [' + b"9" * 5000 + b"]}",
    "no UTF-8": b"\xff\xfe",
    "a zero byte": b'{"text": "\x00"}',
    "a prompt twice": b'{"input_ids": [5], "input_ids": [1000000000]}',
}
PASSED = frozenset(
    {
        "a broken expression", "a file as a picture", "a giant temperature", "a picture", "a picture that is none",
        "a place without a picture", "a prompt that is too long", "a rule that begins with itself", "a schema",
        "a schema that refers to itself", "a sound", "a stream in a batch", "a tag of odd types",
        "a token that is true", "a video", "an adapter nobody loaded", "an expression", "custom_params is an object",
        "experts", "experts from behind the prompt", "frequency_penalty is a fraction",
        "frequency_penalty is negative", "hidden states", "ignore_eos is true", "log-probs from behind the prompt",
        "log-probs of nothing drawn", "many tokens at least", "more pictures than places", "no tokens at most",
        "no_stop_trim is true", "nuclei", "nuclei of a greedy request", "presence_penalty is a fraction",
        "presence_penalty is negative", "sampling_seed is negative", "skip_special_tokens is true",
        "spaces_between_special_tokens is true", "stop is a text", "stop_token_ids is a list",
        "stream_interval is int64", "temperature is a fraction", "temperature is int64", "the smallest temperature",
        "top_k is negative",
    }
)  # fmt: skip
"""Requests to ``/generate`` that pass the checks: the server answers or refuses them itself."""
ODD_STATUS = {
    "odd arguments of a template": 500,
    "the tokens of a message": 500,
    "the text of odd tokens": 500,
} | {name: 401 for name, (path, _) in _DOORS.items() if path.startswith(("/api/", "/parse", "/separate"))
     or path.endswith("_session")}  # fmt: skip
"""Endpoints whose code answers 500, and endpoints closed without the secret; others answer 200, 400 or 422."""
