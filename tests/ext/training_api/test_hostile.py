"""Bodies that no client sends: each gets an error that names the field, and the service keeps running."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from tinker.proto import tinker_public_pb2 as pb

from slime.ext.training_api.http_io import MAX_BODY_BYTES
from tests.ext.training_api.reference_backend import ReferenceBackend
from tests.ext.training_api.serving import Served, serve

BIG = 10**30


class Raw:
    """A plain HTTP client with a session and a model."""

    def __init__(self, served: Served) -> None:
        self.url, self.name = f"{served.url}/api/v1", served.service.settings.model_name
        session = self.post("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"}).json()
        self.session_id = session["session_id"]
        made = self.post("create_model", self.model_body()).json()
        self.model_id = self.post("retrieve_future", {"request_id": made["request_id"]}).json()["model_id"]
        self.seq_id = 0

    def model_body(self, **changes: Any) -> dict[str, Any]:
        body = {"session_id": self.session_id, "model_seq_id": 0, "base_model": self.name, "lora_config": {"rank": 2}}
        return body | changes

    def post(self, path: str, body: Any, **headers: str) -> requests.Response:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"}
        return requests.post(f"{self.url}/{path}", data=sent, headers=kind | headers, timeout=20)

    def next_id(self) -> int:
        self.seq_id += 1
        return self.seq_id


@pytest.fixture(scope="module")
def raw(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Raw]:
    with serve(ReferenceBackend(tiny_model), tiny_model, tmp_path_factory.mktemp("states")) as served:
        yield Raw(served)


BODIES = (
    ("create_session", b"", 400, "body"),
    ("create_session", b"[" * 100_000, 400, "body"),
    ("create_session", {"tags": "x", "user_metadata": None, "sdk_version": "0"}, 400, "tags"),
    ("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0", "more": 1}, 400, "more"),
    ("create_session", {"tags": [], "user_metadata": {"a": "b" * 70_000}, "sdk_version": "0"}, 400, "user_metadata"),
    ("session_heartbeat", {"session_id": "../.."}, 410, "session"),
    ("create_model", {"session_id": "none", "model_seq_id": 1}, 410, "session"),
    ("create_model", {"base_model": "Qwen/Qwen3-8B", "model_seq_id": 1}, 400, "base_model"),
    ("create_model", {"lora_config": None, "model_seq_id": 1}, 400, "lora_config"),
    ("create_model", {"lora_config": {"rank": BIG}, "model_seq_id": 1}, 400, "rank"),
    ("create_model", {"lora_config": {"rank": 0}, "model_seq_id": 1}, 400, "rank"),
    ("create_model", {"lora_config": {"rank": "x"}, "model_seq_id": 1}, 400, "lora_config.rank"),
    ("create_model", {"model_seq_id": -1}, 400, "model_seq_id"),
    (
        "create_model",
        {"model_seq_id": 1, "optimizer_config": {"type": "dimuon", "version": 1}},
        400,
        "optimizer_config",
    ),
    ("optim_step", {"adam_params": {}, "seq_id": None}, 400, "seq_id"),
    ("optim_step", {"adam_params": {}, "seq_id": -1}, 400, "seq_id"),
    ("optim_step", {"adam_params": {}, "seq_id": BIG}, 400, "seq_id"),
    ("optim_step", {"adam_params": {}, "seq_id": 10**6}, 400, "seq_id"),
    ("optim_step", {"adam_params": {}, "seq_id": 1, "model_id": "../../etc"}, 404, "model"),
    ("optim_step", {"adam_params": {"beta1": 1.0}}, 400, "adam_params.beta1"),
    ("optim_step", {"adam_params": {"learning_rate": "nan"}}, 400, "adam_params.learning_rate"),
    ("optim_step", {"adam_params": {"eps": -1}}, 400, "adam_params.eps"),
    ("optim_step", {"optimizer_params": {"type": "dimuon", "learning_rate": 1}}, 400, "adamw"),
    ("save_weights", {"path": "../../up"}, 400, "path"),
    ("save_weights", {"path": "a/b"}, 400, "path"),
    ("save_weights", {"path": ".hidden"}, 400, "path"),
    ("save_weights", {"path": "x" * 200}, 400, "path"),
    ("save_weights", {"path": None}, 400, "path"),
    ("save_weights", {"path": "a", "ttl_seconds": -5}, 400, "ttl_seconds"),
    ("save_weights_for_sampler", {"path": "a", "kind": "inflight"}, 400, "kind"),
    ("save_weights_for_sampler", {}, 400, "sampling_session_seq_id"),
    ("load_weights", {"path": "file:///etc/passwd", "optimizer": False}, 400, "path"),
    ("load_weights", {"path": "tinker://../weights/x", "optimizer": False}, 404, "run"),
    ("load_weights", {"path": "tinker://a/../b", "optimizer": False}, 404, "run"),
    ("weights_info", {"tinker_path": "tinker://%2e%2e/weights/x"}, 404, "run"),
    ("retrieve_future", {"request_id": "x" * 10_000}, 410, "request_id"),
    ("cancel_future", {"request_id": 5}, 400, "request_id"),
    ("create_sampling_session", {"session_id": "SESSION", "sampling_session_seq_id": 0}, 400, "model_path"),
    ("asample", {"sampling_session_id": None}, 400, "sampling_session_id"),
    ("asample", {"sampling_session_id": "a:sample:0"}, 410, "session"),
    ("asample", {"num_samples": 0}, 400, "num_samples"),
    ("asample", {"num_samples": BIG}, 400, "num_samples"),
    ("asample", {"prompt": {"chunks": []}}, 400, "prompt"),
    ("asample", {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [512]}]}}, 400, "prompt"),
    ("asample", {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [-1]}]}}, 400, "prompt"),
    ("asample", {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1] * 3000}]}}, 400, "prompt"),
    ("asample", {"prompt": {"chunks": [{"type": "image", "data": "aa", "format": "png"}]}}, 400, "prompt.chunks"),
    ("asample", {"sampling_params": {"temperature": -1}}, 400, "sampling_params.temperature"),
    ("asample", {"sampling_params": {"temperature": "inf"}}, 400, "sampling_params.temperature"),
    ("asample", {"sampling_params": {"top_p": 0}}, 400, "sampling_params.top_p"),
    ("asample", {"sampling_params": {"max_tokens": 10**7}}, 400, "prompt"),
    ("asample", {"sampling_params": {"stop": [""]}}, 400, "sampling_params.stop"),
    ("asample", {"sampling_params": {"stop": ["x" * 2000]}}, 400, "sampling_params.stop"),
    ("asample", {"sampling_params": {"stop": [1] * 100}}, 400, "sampling_params.stop"),
    ("asample", {"sampling_params": {"stop": [BIG]}}, 400, "sampling_params.stop"),
    ("asample", {"seq_id": BIG}, 400, "seq_id"),
    ("create_model", {"model_seq_id": 10**200}, 400, "model_seq_id"),
    ("create_sampling_session", {"sampling_session_seq_id": 10**4000, "base_model": "x"}, 400, "seq_id"),
    (
        "create_session",
        {"tags": [], "user_metadata": None, "sdk_version": "0", "display_name": "x" * 70_000},
        400,
        "display_name",
    ),
    ("asample", {"topk_sample_logprobs": 3}, 400, "topk_sample_logprobs"),
    ("asample", {"record_stability_info": True}, 400, "record_stability_info"),
    ("asample", {"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, 400, "prompt_logprobs_last_n"),
    ("no_such_path", {}, 404, "no_such_path"),
)


@pytest.mark.parametrize(("path", "body", "status", "named"), BODIES, ids=lambda value: str(value)[:40])
def test_a_wrong_body_is_refused_by_its_field(raw: Raw, path: str, body: Any, status: int, named: str) -> None:
    if path == "create_model":
        body = raw.model_body(**body)
    elif path in ("optim_step", "save_weights", "save_weights_for_sampler"):
        body = {"model_id": raw.model_id} | body
        if "seq_id" not in body:
            body["seq_id"] = raw.next_id()
    elif path == "create_sampling_session":
        body["session_id"] = raw.session_id
    elif path == "asample":
        base = {"session_id": raw.session_id, "sampling_session_seq_id": 7, "base_model": raw.name}
        sampler_id = raw.post("create_sampling_session", base).json()["sampling_session_id"]
        text = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
        body = {"sampling_session_id": sampler_id, "seq_id": 0, "prompt": text, "sampling_params": {}} | body
    answer = raw.post(path, body)
    assert (answer.status_code, named in answer.json()["error"]) == (status, True), answer.text
    assert raw.post("get_info", {"model_id": raw.model_id}).status_code == 200


def tensor(values: Any, kind: type = np.float32, **changes: Any) -> pb.Tensor:
    array = np.asarray(values, kind)
    message = pb.Tensor(dtype=pb.DTYPE_INT64 if kind is np.int64 else pb.DTYPE_FLOAT32, shape=array.shape)
    if "csr" in changes:
        message.sparse_csr.CopyFrom(changes.pop("csr"))
    else:
        message.dense = array.tobytes()
    if "shape" in changes:
        del message.shape[:]
        message.shape.extend(changes["shape"])
    if "dtype" in changes:
        message.dtype = changes["dtype"]
    return message


TARGETS = tensor([1, 2], np.int64)
CSR = pb.SparseCsr(
    values=np.zeros(1, np.float32).tobytes(),
    crow_indices=np.array([0, 1, 9], np.int64).tobytes(),
    col_indices=np.array([0], np.int64).tobytes(),
)
TOKENS = np.array([1, 2], np.int32).tobytes()
DATA = (
    ({"tokens": b""}, "data[0].model_input"),
    ({"tokens": b"abc"}, "data[0].model_input"),
    ({"tokens": np.array([1, 512], np.int32).tobytes()}, "data[0].model_input"),
    ({"tokens": np.ones(5000, np.int32).tobytes()}, "data[0].model_input"),
    ({"chunk": pb.Chunk(image=pb.ImageChunk(data=b"x", format="png"))}, "data[0].model_input"),
    ({"inputs": {}}, "target_tokens"),
    ({"inputs": {"target_tokens": tensor([1.0, 2.0])}}, "target_tokens"),
    ({"inputs": {"target_tokens": tensor([1], np.int64)}}, "target_tokens"),
    ({"inputs": {"target_tokens": tensor([1, 600], np.int64)}}, "target_tokens"),
    ({"inputs": {"target_tokens": tensor([1, 2], np.int64, shape=[2**40])}}, "target_tokens"),
    ({"inputs": {"target_tokens": tensor([1, 2], np.int64, shape=[-2])}}, "target_tokens"),
    ({"inputs": {"target_tokens": tensor([1, 2], np.int64, dtype=pb.DTYPE_BFLOAT16)}}, "target_tokens"),
    ({"inputs": {"target_tokens": TARGETS, "weights": tensor([1.0])}}, "weights"),
    ({"inputs": {"target_tokens": TARGETS, "weights": tensor([np.nan, 1.0])}}, "weights"),
    ({"inputs": {"target_tokens": TARGETS, "weights": tensor([0, 0], csr=CSR, shape=[2, 2])}}, "weights"),
    ({"inputs": {"target_tokens": TARGETS, "weights": tensor([0], csr=CSR, shape=[2])}}, "weights"),
    ({"inputs": {"target_tokens": TARGETS, "weights": tensor([0], csr=CSR, shape=[2**30, 2**30])}}, "weights"),
    ({"inputs": {"target_tokens": TARGETS, "weights": tensor(np.zeros((2, 1025)))}}, "weights"),
    (
        {"number": 200, "inputs": {"target_tokens": TARGETS, "weights": tensor([0], csr=CSR, shape=[2**10, 2**10])}},
        "data[64]",
    ),
    ({"inputs": {"target_tokens": TARGETS, "advantages": tensor([1.0, 1.0])}}, "advantages"),
    ({"loss": "ppo"}, "logprobs"),
    ({"loss": "__import__"}, "loss_fn"),
    ({"config": {"beta": 1.0}}, "loss_fn_config"),
    ({"text": {"beta": "x"}}, "loss_fn_config.beta"),
    ({"number": 2000}, "data"),
    ({"number": 0}, "data"),
)


@pytest.mark.parametrize(("case", "named"), DATA, ids=[str(i) for i in range(len(DATA))])
def test_data_that_fit_no_pass_are_refused_by_their_field(raw: Raw, case: dict[str, Any], named: str) -> None:
    message = pb.ForwardBackwardRequest(model_id=raw.model_id, seq_id=raw.next_id(), forward_only=True)
    message.loss_fn = case.get("loss", "cross_entropy")
    for _ in range(case.get("number", 1)):
        datum = message.data.add()
        text = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=case.get("tokens", TOKENS)))
        datum.model_input.append(case.get("chunk", text))
        for name, value in case.get("inputs", {"target_tokens": TARGETS}).items():
            datum.loss_fn_inputs[name].CopyFrom(value)
    for name, value in case.get("config", {}).items():
        message.loss_fn_config[name] = value
    for name, value in case.get("text", {}).items():
        message.loss_fn_config_v2[name].text = value
    kind = {"Content-Type": "application/x-protobuf"}
    answer = raw.post("forward_backward", message.SerializeToString(), **kind)
    assert (answer.status_code, named in answer.json()["error"]) == (400, True), answer.text


def test_what_is_no_message_of_the_protocol_is_refused_before_it_is_read(raw: Raw) -> None:
    kind = {"Content-Type": "application/x-protobuf"}
    assert raw.post("forward_backward", b"\xff\xff\xff", **kind).status_code == 400
    assert raw.post("forward_backward", b"{}").status_code == 415
    assert raw.post("create_session", b"{}", **{"Content-Type": "text/plain"}).status_code == 415
    large = raw.post("telemetry", b" " * (MAX_BODY_BYTES + 1))
    assert large.status_code == 413 and "64 MiB" in large.json()["error"]
    assert raw.post("telemetry", b"{}", Origin="http://evil.example").status_code == 403
    assert raw.post("telemetry", b"{}", Host="evil.example").status_code == 403
    for query, status in (("limit=x", 400), ("limit=9999999", 200), ("offset=-1", 400), ("offset=5", 200)):
        assert requests.get(f"{raw.url}/training_runs?{query}", timeout=20).status_code == status
    for path in ("training_runs/..%2f..%2fetc", "training_runs/a/checkpoints/weights/..", "sessions/none"):
        assert requests.get(f"{raw.url}/{path}", timeout=20).status_code in (404, 405, 410)
