"""Between the messages of the ``tinker`` package, 0.38.0, and what the backend takes and gives.

Bodies of passes and answers with arrays are protobuf messages, as the package's ``proto`` has them; arrays are bytes.
Shapes: T = tokens of a datum, K = targets a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb
from tinker.types import AdamParams as WireAdam
from tinker.types import ModelInput, SampleRequest

from slime.ext.training_api.backend import AdamParams, Datum, PassRequest, PassResult, SampleResult, SamplingParams
from slime.ext.training_api.errors import Refused
from slime.ext.training_api.losses import TARGETS

PROTOBUF = "application/x-protobuf"
MAX_DATA = 1024
"""Data of one request; the client sends larger batches in several."""
MAX_SAMPLES = 1024
MAX_NUMBERS = 2**26
"""Of all sparse tensors of a request, zeros too."""
MAX_TOPK = 64
MAX_TARGETS = 1024
"""Of a token."""
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
NO_LOGPROB = -99999.0
"""The log-prob of an empty place in a table of likeliest tokens."""


_DTYPES: dict[int, np.dtype[Any]] = {pb.DTYPE_FLOAT32: np.dtype("<f4"), pb.DTYPE_INT64: np.dtype("<i8")}


@dataclass(frozen=True)
class TextLimits:
    """What a text may be."""

    vocab_size: int
    max_length: int

    def check(self, tokens: Sequence[int], where: str, room: int = 0) -> None:
        """Refuse a text that the model cannot read, or after which it cannot write ``room`` tokens.

        Raises:
            Refused: with ``where``, the place in the request.
        """
        if not 1 <= len(tokens) <= self.max_length - room:
            also = f", {room} of them for sampled ones" if room else ""
            raise Refused(f"{where} has {len(tokens)} tokens; allowed are 1 to {self.max_length} in all{also}.")
        if not (0 <= min(tokens) and max(tokens) < self.vocab_size):
            raise Refused(f"{where} has a token outside 0 to {self.vocab_size - 1}.")


def read_pass(body: bytes) -> Any:
    """Parse a body of ``/forward_backward``.

    Raises:
        Refused: it is no such message.
    """
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise Refused(f"The body is no ForwardBackwardRequest: {error}.") from None
    return message


def pass_request(message: Any) -> PassRequest:
    """Return what a parsed body asks for; ``losses.check_pass`` compares it with the model.

    Raises:
        Refused: data that are no text, or tensors that are none.
    """
    if len(message.data) > MAX_DATA:
        raise Refused(f"data has {len(message.data)} entries; allowed are {MAX_DATA} a request.")
    config = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise Refused(f"loss_fn_config.{name} is {value.text[:80]!r}; it must be a number.")
        config[name] = value.number
    _check_sparse(message)
    return PassRequest(
        model_id=message.model_id,
        data=[_datum(one, f"data[{i}]") for i, one in enumerate(message.data)],
        loss=message.loss_fn,
        loss_config=config,
        backward=not message.forward_only,
    )


def _check_sparse(message: Any) -> None:
    """Refuse tensors that are small on the wire and too large once they are dense."""
    total = 0
    for i, one in enumerate(message.data):
        for name, value in one.loss_fn_inputs.items():
            if value.WhichOneof("encoding") == "sparse_csr":
                total += abs(math.prod(value.shape))
            if total > MAX_NUMBERS:
                where = f"data[{i}].loss_fn_inputs.{name}"
                raise Refused(f"The sparse tensors up to {where} have {total} numbers; allowed are {MAX_NUMBERS}.")


def _datum(message: Any, where: str) -> Datum:
    kinds = {str(chunk.WhichOneof("chunk")) for chunk in message.model_input} - {"encoded_text"}
    if kinds:
        raise Refused(f"{where}.model_input has a chunk of kind {min(kinds)}; this server reads text alone.")
    text = b"".join(chunk.encoded_text.tokens for chunk in message.model_input)
    if len(text) % 4:
        raise Refused(f"{where}.model_input has tokens of {len(text)} bytes; each has four.")
    inputs = {name: _tensor(value, f"{where}.loss_fn_inputs.{name}") for name, value in message.loss_fn_inputs.items()}
    for name in inputs.keys() - {TARGETS}:
        inputs[name] = inputs[name].astype(np.float32)
    return Datum(np.frombuffer(text, "<i4").tolist(), inputs)


def _tensor(message: Any, where: str) -> np.ndarray:
    if message.dtype not in _DTYPES:
        raise Refused(f"{where} has the dtype {message.dtype}; it must be float32 or int64.")
    dtype, shape = _DTYPES[message.dtype], list(message.shape)
    if len(shape) > 2 or any(not 0 <= side < 2**31 for side in shape):
        raise Refused(f"{where} has the shape {shape}; it must have one or two sides.")
    if len(shape) == 2 and shape[1] > MAX_TARGETS:
        raise Refused(f"{where} has the shape {shape}; allowed are {MAX_TARGETS} numbers a token.")
    try:
        if message.WhichOneof("encoding") == "sparse_csr":
            return _dense(message.sparse_csr, dtype, shape)
        values = np.frombuffer(message.dense, dtype)
        return values.reshape(shape) if shape else values
    except (ValueError, IndexError) as error:
        raise Refused(f"{where} does not have the shape {shape}: {error}.") from None


def _dense(csr: Any, dtype: np.dtype[Any], shape: Sequence[int]) -> np.ndarray:
    rows, columns = shape
    values = np.frombuffer(csr.values, dtype)
    starts, which = np.frombuffer(csr.crow_indices, "<i8"), np.frombuffer(csr.col_indices, "<i8")
    counts = np.diff(starts)
    if len(starts) != rows + 1 or starts[0] != 0 or (counts < 0).any() or not starts[-1] == len(values) == len(which):
        raise ValueError("its rows do not add up")
    if len(which) and not (0 <= which.min() and which.max() < columns):
        raise ValueError("a column is outside")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(rows), counts), which] = values
    return dense


def write_pass(result: PassResult) -> bytes:
    """Return the answer to a pass: each output field of the data, one record for each run of data of one shape."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=result.metrics)

    def sides(output: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
        return {name: value.shape[1:] for name, value in output.items()}

    for shape, group in groupby(result.outputs, key=sides):
        outputs = list(group)
        record = message.loss_fn_outputs.add(num_datums=len(outputs))
        for name, trailing in shape.items():
            arrays = [np.ascontiguousarray(output[name], dtype="<f4") for output in outputs]
            field = record.fields[name]
            field.data = b"".join(array.tobytes() for array in arrays)
            field.offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8").tobytes()
            field.dtype = pb.DTYPE_FLOAT32
            field.trailing_shape.extend(trailing)
    return message.SerializeToString()


def read_adam(params: Any) -> AdamParams:
    """Return the step that a client asks for.

    Raises:
        Refused: another optimizer, or numbers that are no step of Adam's.
    """
    if not isinstance(params, WireAdam):
        raise Refused(f"The optimizer is {params.type!r}; it must be adamw.")
    values = {name: float(getattr(params, name)) for name in AdamParams.__dataclass_fields__}
    bounds: dict[str, Callable[[float], bool]] = {
        "beta1": lambda value: 0 <= value < 1,
        "beta2": lambda value: 0 <= value < 1,
    }
    for name, value in values.items():
        if not (math.isfinite(value) and bounds.get(name, lambda value: value >= 0)(value)):
            raise Refused(f"adam_params.{name} is {value}; it must be finite and " + (
                "from 0 to below 1." if name in bounds else "not negative."
            ))  # fmt: skip
    return AdamParams(**values)


def read_prompt(prompt: ModelInput, where: str = "prompt") -> list[int]:
    """Return the tokens of a text.

    Raises:
        Refused: it has an image or a sound.
    """
    for i, chunk in enumerate(prompt.chunks):
        if chunk.type != "encoded_text":
            raise Refused(f"{where}.chunks[{i}] is of kind {chunk.type}; this server reads encoded_text alone.")
    return prompt.to_ints()


def read_sampling(request: SampleRequest, limits: TextLimits) -> tuple[list[int], SamplingParams]:
    """Return the prompt and how to continue it.

    Raises:
        Refused: something that is not served, or numbers that are no way to sample.
    """
    not_served = {
        "topk_sample_logprobs": request.topk_sample_logprobs,
        "target_prompt_logprobs": request.target_prompt_logprobs,
        "prompt_alt_tokens_k": request.prompt_alt_tokens_k,
        "record_stability_info": request.record_stability_info,
    }
    for name, value in not_served.items():
        if value:
            raise Refused(f"{name} is not served; leave it out.")
    given = request.sampling_params
    tokens = read_prompt(request.prompt)
    limits.check(tokens, "prompt", room=given.max_tokens or 1)
    checks: dict[str, tuple[Any, bool, str]] = {
        "num_samples": (request.num_samples, 1 <= request.num_samples <= MAX_SAMPLES, f"1 to {MAX_SAMPLES}"),
        "topk_prompt_logprobs": (
            request.topk_prompt_logprobs, 0 <= request.topk_prompt_logprobs <= MAX_TOPK, f"0 to {MAX_TOPK}",
        ),
        "sampling_params.max_tokens": (given.max_tokens, given.max_tokens is None or given.max_tokens > 0, "positive"),
        "sampling_params.temperature": (given.temperature, 0 <= given.temperature < math.inf, "0 or more"),
        "sampling_params.top_p": (given.top_p, 0 < given.top_p <= 1, "above 0, up to 1"),
        "sampling_params.top_k": (given.top_k, given.top_k == -1 or given.top_k > 0, "-1 or positive"),
        "sampling_params.seed": (given.seed, given.seed is None or 0 <= given.seed < 2**63, "0 to 2^63 - 1"),
        "prompt_logprobs_last_n": (
            last := request.prompt_logprobs_last_n, last is None or 1 <= last < len(tokens), "1 to len(prompt) - 1",
        ),
    }  # fmt: skip
    for name, (value, is_right, allowed) in checks.items():
        if not is_right:
            raise Refused(f"{name} is {value}; it must be {allowed}.")
    stop = [given.stop] if isinstance(given.stop, str) else given.stop
    _check_stop(stop or (), limits)
    return tokens, SamplingParams(
        max_tokens=given.max_tokens,
        seed=given.seed,
        stop=None if stop is None else list(stop),  # type: ignore[arg-type]
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
    )


def _check_stop(stop: Sequence[str] | Sequence[int], limits: TextLimits) -> None:
    if len(stop) > MAX_STOPS:
        raise Refused(f"sampling_params.stop has {len(stop)} entries; allowed are {MAX_STOPS}.")
    for one in stop:
        if isinstance(one, str):
            is_right, allowed = 1 <= len(one) <= MAX_STOP_LENGTH, f"1 to {MAX_STOP_LENGTH} letters"
        else:
            is_right, allowed = 0 <= one < limits.vocab_size, f"0 to {limits.vocab_size - 1}"
        if not is_right:
            raise Refused(f"sampling_params.stop has {str(one)[:80]!r}; allowed are {allowed}.")


def write_sample(result: SampleResult, last_n: int | None) -> bytes:
    """Return the answer to a sampling request, with scores of the last ``last_n`` prompt tokens, or of all."""
    message = pb.SampleResponse()
    for sequence in result.sequences:
        message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if sequence.stop_reason == "stop" else pb.STOP_REASON_LENGTH,
            tokens=np.asarray(sequence.tokens, "<i4").tobytes(),
            logprobs=np.asarray(sequence.logprobs, "<f4").tobytes(),
        )
    if result.prompt_logprobs is not None:
        scores = np.array([math.nan if one is None else one for one in result.prompt_logprobs], "<f4")
        scores[: len(scores) - (len(scores) if last_n is None else last_n)] = math.nan
        message.prompt_logprobs = scores.tobytes()
    if result.topk_prompt_logprobs is not None:
        rows = result.topk_prompt_logprobs
        hidden = 0 if last_n is None else len(rows) - last_n
        width = max((len(row) for row in rows if row is not None), default=0)
        ids = np.zeros((len(rows), width), "<i4")
        table = np.full((len(rows), width), NO_LOGPROB, "<f4")
        for i, row in enumerate(rows):
            for j, (token, score) in enumerate(row if row is not None and i >= hidden else ()):
                ids[i, j], table[i, j] = token, score
        field = message.topk_prompt_logprobs
        field.token_ids, field.logprobs, field.k, field.length = ids.tobytes(), table.tobytes(), width, len(rows)
    return message.SerializeToString()
