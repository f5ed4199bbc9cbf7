"""The real SGLang server behind the real router, on the CPU, against transformers.  One engine serves all tests.

It is a vision model: tests send text and images.
"""

from __future__ import annotations

import base64
import json
import pickle
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import torch
from PIL import Image, ImageDraw

from slime.backends.sglang_utils import cpu_shim
from slime.backends.sglang_utils.server_control import ServerControl
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.ext.fast_push import engine_verbs
from slime.ext.fast_push.flags import PLUGIN
from slime.ext.fast_push.loaders import FILL_WITH_NAN, FIND_NAN, WEIGHT_LOADERS
from slime.rollout.engine_request import append_output, request_payload
from slime.utils.errors import WeightSyncError
from slime.utils.processing_utils import full_pixels, load_processor
from slime.utils.types import Sample
from tests.contracts.source_tree import REPO
from tests.eventually import wait_until
from tests.loaded_model.buckets import digests, fill, whole_buckets
from tests.unit.backends.sglang_utils.hostile_requests import ODD_STATUS, RAW, REQUESTS

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU path; engines on a GPU have tests of their own"),
]

PROMPT = [5, 6, 7, 8, 9]
RED, GREEN, BLUE = (250, 40, 10), (10, 200, 30), (20, 60, 220)
ROLLOUT: Any = Namespace(use_rollout_routing_replay=False, sglang_speculative_algorithm=None)
FLAGS = {"weight_loaders": [*WEIGHT_LOADERS], "engine_plugins": [[PLUGIN]], "engine_settings": {}}
"""Start arguments of an engine for verified pushes."""


@dataclass
class Running:
    """The engine under test, and the two models whose weights it may hold."""

    engine: SGLangEngine
    router_url: str
    owner: subprocess.Popen[bytes]
    roots: list[int]
    start_s: float
    models: dict[int, Any]
    folders: dict[int, Path]
    router_metrics_url: str
    processor: Any

    def post(self, payload: dict[str, Any]) -> requests.Response:
        """The router's answer."""
        with requests.Session() as session:
            session.trust_env = False
            return session.post(f"{self.router_url}/generate", json=payload, timeout=300)

    def generate(self, num_tokens: int = 16, **sampling: Any) -> dict[str, Any]:
        """One response through the router, greedy by default."""
        sampling = {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True} | sampling
        response = self.post({"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True})
        response.raise_for_status()
        return response.json()

    def error_against(self, seed: int) -> float:
        """Largest difference between the engine's log-probs and those of model ``seed`` in transformers."""
        pairs = self.generate()["meta_info"]["output_token_logprobs"]
        tokens = PROMPT + [token for _, token, *_ in pairs]
        return self.difference(seed, tokens, [log_prob for log_prob, *_ in pairs])

    def difference(self, seed: int, tokens: list[int], log_probs: list[float], **pictures: Any) -> float:
        """Largest log-prob difference of the last tokens from model ``seed`` in transformers."""
        with torch.no_grad():
            expected = self.models[seed](torch.tensor([tokens]), **pictures).logits.float().log_softmax(-1)[0]
        drawn = range(len(tokens) - len(log_probs), len(tokens))
        ours = expected[[index - 1 for index in drawn], [tokens[index] for index in drawn]]
        return (ours - torch.tensor(log_probs)).abs().max().item()

    def sample(self, *colours: tuple[int, int, int]) -> Sample:
        """A question about images of these colors."""
        parts = [part for _ in colours for part in ({"type": "image"}, {"type": "text", "text": "how many"})]
        messages = [{"role": "user", "content": parts}]
        prompt = self.processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return Sample(index=0, prompt=prompt, multimodal_inputs={"images": [picture(colour) for colour in colours]})

    def go_on(self, sample: Sample, num_tokens: int) -> dict[str, Any]:
        """Continue a sample as a rollout does; return the engine's view of the request."""
        params = {"max_new_tokens": sample.response_length + num_tokens, "temperature": 0.0, "ignore_eos": True}
        state = Namespace(tokenizer=self.processor.tokenizer, processor=self.processor)
        response = self.post(request_payload(ROLLOUT, sample, params, state))
        response.raise_for_status()
        append_output(ROLLOUT, sample, response.json())
        return response.json()["meta_info"]

    def error_of(self, sample: Sample, seed: int) -> float:
        """Largest difference between a sample's log-probs and those of model ``seed``, with the images."""
        inputs, tokens = sample.multimodal_train_inputs, sample.tokens
        is_picture = torch.tensor([[token == self.processor.image_token_id for token in tokens]]).int()
        pictures = {"pixel_values": full_pixels(inputs), "image_grid_thw": inputs["image_grid_thw"]}
        return self.difference(seed, tokens, sample.rollout_log_probs, mm_token_type_ids=is_picture, **pictures)

    def named_tensors(self, seed: int) -> list[tuple[str, torch.Tensor]]:
        """A copy of the HF weights of model ``seed``."""
        return [(name, tensor.detach().clone()) for name, tensor in self.models[seed].state_dict().items()]

    def push(self, seed: int, version: str) -> None:
        """Push model ``seed`` as one flattened bucket through shared memory."""
        self.engine.pause_generation()
        self.engine.flush_cache()
        self.engine.update_weights_from_tensor([shared_bucket(self.named_tensors(seed))], "flattened_bucket", version)
        self.engine.continue_generation()

    def offer(
        self, seed: int, push_id: str, *, corrupt: int | None = None, buckets: Sequence[int] = (0, 1, 2)
    ) -> tuple[list[str], dict[str, Any]]:
        """Push model ``seed`` in three buckets, except for the commit; return (expected digests, acknowledgement)."""
        from sglang.srt.utils import MultiprocessingSerializer

        tensors = dict(self.named_tensors(seed))
        manifest = whole_buckets(tensors, 3)
        flats = fill(manifest, tensors)
        sent = digests(manifest, flats)
        if corrupt is not None:
            flats[corrupt][8] ^= 1
        engine_verbs.begin_weight_update(self.engine, manifest.id, push_id, manifest.to_json())
        for index in buckets:
            handle = MultiprocessingSerializer.serialize(flats[index].share_memory_(), output_str=True)
            engine_verbs.receive_weight_buckets(self.engine, push_id, {index: [handle]})
        return sent, engine_verbs.acknowledge_weight_update(self.engine, push_id)


def picture(colour: tuple[int, int, int]) -> Image.Image:
    shown = Image.new("RGB", (48, 33), colour)
    ImageDraw.Draw(shown).ellipse((1, 0, 24, 32), fill=(250, 250, 0))
    return shown


def shared_bucket(named_tensors: list[tuple[str, torch.Tensor]]) -> str:
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    bucket = FlattenedTensorBucket(named_tensors=named_tensors)
    payload = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    return MultiprocessingSerializer.serialize(payload, output_str=True)


def by_value(named_tensors: list[tuple[str, torch.Tensor]]) -> str:
    return base64.b64encode(pickle.dumps(named_tensors, protocol=4)).decode("ascii")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    cpu_shim.install()
    from tests.e2e.engine_owner import engine_args
    from tests.e2e.tiny_qwen3_vl import save_tiny_model

    torch.multiprocessing.set_sharing_strategy("file_system")
    folder = tmp_path_factory.mktemp("engine")
    folders = {seed: folder / f"seed{seed}" for seed in (0, 1)}
    models = {seed: save_tiny_model(path, seed) for seed, path in folders.items()}
    out = folder / "engine.json"
    log = (folder / "owner.log").open("wb")
    owner = subprocess.Popen(
        [sys.executable, str(REPO / "tests/e2e/engine_owner.py"), str(folders[0]), str(out), json.dumps(FLAGS)],
        stdout=log,
        stderr=subprocess.STDOUT,
        env=child_environment(),
    )
    try:
        while not out.exists():
            assert owner.poll() is None, (folder / "owner.log").read_text()
            time.sleep(0.2)
        facts = json.loads(out.read_text())
        engine = SGLangEngine(engine_args(str(folders[0]), **FLAGS), rank=0)
        engine.connect(facts["engine_url"])
        urls = facts["router_url"], facts["router_metrics_url"]
        processor = load_processor(str(folders[0]))
        yield Running(engine, urls[0], owner, facts["roots"], facts["start_s"], models, folders, urls[1], processor)
    finally:
        owner.kill()
        owner.wait(timeout=60)
        log.close()


def child_environment() -> dict[str, str]:
    from slime.utils import env

    root = str(REPO)
    return env.copy() | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}


def test_log_probs_through_the_router_are_those_of_transformers(running: Running) -> None:
    assert running.error_against(0) < 1e-5
    assert running.error_against(1) > 0.1
    print(f"\nengine start {running.start_s:.1f} s", file=sys.stderr)


def test_the_engine_shows_its_metrics_and_its_loads(running: Running) -> None:
    running.generate(4)
    url = running.engine.get_url()
    with requests.Session() as session:
        session.trust_env = False
        loads, page = (session.get(f"{url}/{path}", timeout=120) for path in ("v1/loads", "metrics"))
        router_page = session.get(running.router_metrics_url, timeout=120)
    assert (loads.status_code, page.status_code, router_page.status_code) == (200, 200, 200)
    assert "smg_http_responses_total" in router_page.text
    shown = {line.split("{")[0] for line in page.text.splitlines() if line.startswith("sglang:")}
    assert shown >= {"sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage", "sglang:gen_throughput"}
    assert 'endpoint="/v1/loads"' in page.text


def test_a_push_through_shared_memory_replaces_the_weights(running: Running) -> None:
    running.push(1, "7")
    assert running.error_against(1) < 1e-5
    assert running.engine.get_weight_version() == "7"
    assert running.generate(2)["meta_info"]["weight_version"] == "7"


def test_pushes_in_two_phases_are_acknowledged_committed_and_served(running: Running) -> None:
    """The first goes through the model's own loader, the second through the plan that the first verified."""
    engine = running.engine
    for seed, version in ((0, "21"), (1, "22")):
        engine.pause_generation()
        engine.flush_cache()
        sent, answer = running.offer(seed, f"push {version}")
        assert answer.pop("seconds").keys() == {"digest", "place"}
        assert answer == {"push_id": f"push {version}", "buckets": sent, "problems": []}
        assert engine.get_weight_version() != version
        with pytest.raises(WeightSyncError, match=f"holds the unfinished push push {version}"):
            engine.continue_generation()
        engine_verbs.commit_weight_update(engine, f"push {version}", version)
        engine.continue_generation()
        assert engine.get_weight_version() == version
        assert running.generate(2)["meta_info"]["weight_version"] == version
        assert running.error_against(seed) < 1e-5


def test_a_corrupt_bucket_shows_in_its_digest_and_a_missing_one_is_not_committed(running: Running) -> None:
    engine = running.engine
    engine.pause_generation()
    engine.flush_cache()
    version = engine.get_weight_version()
    sent, answer = running.offer(0, "corrupt", corrupt=1)
    assert [index for index in range(len(sent)) if answer["buckets"][index] != sent[index]] == [1]
    running.offer(0, "incomplete", buckets=[0, 2])
    with pytest.raises(WeightSyncError, match="will not serve push incomplete as version 30"):
        engine_verbs.commit_weight_update(engine, "incomplete", "30")
    assert engine.get_weight_version() == version
    sent, answer = running.offer(0, "repaired")
    assert answer["buckets"] == sent
    engine_verbs.commit_weight_update(engine, "repaired", "31")
    engine.continue_generation()
    assert running.error_against(0) < 1e-5


def test_a_push_that_forgets_tensors_is_found_out(running: Running) -> None:
    nothing = by_value([])
    engine_verbs.run_weight_check(running.engine, FILL_WITH_NAN, nothing)
    without_keys = [(name, tensor) for name, tensor in running.named_tensors(0) if "k_proj" not in name]
    running.engine.update_weights_from_tensor([shared_bucket(without_keys)], "flattened_bucket", "1")
    with pytest.raises(WeightSyncError, match=r"qkv_proj.weight: 8192 of 32768 elements were never pushed"):
        engine_verbs.run_weight_check(running.engine, FIND_NAN, nothing)
    running.push(0, "1")
    engine_verbs.run_weight_check(running.engine, FIND_NAN, nothing)


def test_an_engine_compares_its_weights_with_a_snapshot(running: Running) -> None:
    running.engine.check_weights("snapshot")
    running.engine.check_weights("compare")
    running.engine.check_weights("reset_tensors")
    with pytest.raises(WeightSyncError, match="differs from its snapshot"):
        running.engine.check_weights("compare")
    running.push(0, "1")
    running.engine.check_weights("compare")


def test_a_push_over_gloo_replaces_the_weights(running: Running) -> None:
    from sglang.srt.utils import init_custom_process_group
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    group_name, load_format = "test", "flattened_bucket"
    running.push(1, "1")
    tensors = running.named_tensors(0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(running.engine.init_weights_update_group, "127.0.0.1", port, 1, 2, group_name, "gloo")
        group = init_custom_process_group(
            backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name=group_name
        )
        joined.result(timeout=300)
        running.engine.pause_generation()
        running.engine.flush_cache()
        updated = pool.submit(
            running.engine.update_weights_from_distributed,
            [name for name, _ in tensors],
            [str(tensor.dtype) for _, tensor in tensors],
            [tensor.shape for _, tensor in tensors],
            group_name,
            "2",
            load_format,
        )
        flat = FlattenedTensorBucket(named_tensors=tensors).get_flattened_tensor()
        torch.distributed.broadcast(flat, 0, group=group)
        updated.result(timeout=300)
    running.engine.continue_generation()
    running.engine.destroy_weights_update_group(group_name)
    torch.distributed.destroy_process_group(group)
    assert running.error_against(0) < 1e-5
    assert running.engine.get_weight_version() == "2"


def test_a_push_from_disk_replaces_the_weights(running: Running) -> None:
    running.engine.update_weights_from_disk(str(running.folders[1]), "3")
    assert running.error_against(1) < 1e-5
    assert running.engine.get_weight_version() == "3"


def load(server: ServerControl, *names: str) -> int:
    """Return the sum of these numbers of ``/v1/loads``, over the server's data-parallel ranks."""
    loads = server.get("/v1/loads?include=core")["loads"]
    return sum(one[name] for one in loads for name in names)


def num_requests_in_flight(server: ServerControl) -> int:
    """Return the requests that run or wait on the server."""
    return load(server, "num_running_reqs", "num_waiting_reqs")


@pytest.mark.parametrize("verb", ["abort_all", "pause_generation"])
def test_an_abort_returns_what_was_generated_so_far(running: Running, verb: str) -> None:
    server = ServerControl(running.engine.get_url() or "", api_key=running.engine.args.job_secret)
    with ThreadPoolExecutor(1) as pool:
        response = pool.submit(running.generate, 480, temperature=1.0)
        # By tokens, not by time: a fast machine generates all of them within a second.
        while load(server, "num_used_tokens") < len(PROMPT) + 8 and not response.done():
            time.sleep(0.01)
        getattr(running.engine, verb)()
        answer = response.result(timeout=300)
    running.engine.continue_generation()
    wait_until(lambda: num_requests_in_flight(server) == 0, "the end of all requests", timeout_s=120)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"]) < 480


def test_pictures_are_kept_with_their_prompts_until_a_push(running: Running) -> None:
    running.push(0, "1")
    first, again, other = samples = [running.sample(RED, shown) for shown in (BLUE, BLUE, GREEN)]
    cached = [running.go_on(sample, 4)["cached_tokens"] for sample in samples]
    image = running.processor.image_token_id
    second = [at for at, token in enumerate(first.tokens) if token == image and first.tokens[at - 1] != image][1]
    assert cached == [0, len(first.tokens) - 4 - 1, second]
    assert first.tokens == again.tokens and first.rollout_log_probs != other.rollout_log_probs
    assert max(running.error_of(sample, 0) for sample in samples) < 2e-5
    running.push(1, "2")
    later = running.sample(RED, BLUE)
    assert running.go_on(later, 4)["cached_tokens"] == 0
    assert running.error_of(later, 1) < 2e-5 < running.error_of(later, 0)


def test_a_sample_with_pictures_goes_on_where_it_was_aborted(running: Running) -> None:
    running.push(0, "1")
    server = ServerControl(running.engine.get_url() or "", api_key=running.engine.args.job_secret)
    sample = running.sample(RED, BLUE)
    with ThreadPoolExecutor(1) as pool:
        response = pool.submit(running.go_on, sample, 400)
        wait_until(lambda: num_requests_in_flight(server) > 0, "a request in flight")
        time.sleep(0.2)
        running.engine.abort_all()
        response.result(timeout=300)
    before, kept = list(sample.tokens), sample.response_length
    assert sample.status is Sample.Status.ABORTED and 0 < kept < 400
    told = running.go_on(sample, 8)
    assert told["prompt_tokens"] == len(before) and told["cached_tokens"] >= len(before) - kept
    assert sample.tokens[: len(before)] == before and sample.response_length == kept + 8
    assert running.error_of(sample, 0) < 2e-5


def test_release_and_resume_may_be_repeated(running: Running) -> None:
    running.push(0, "1")
    running.engine.release_memory_occupation()
    running.engine.release_memory_occupation()
    running.engine.resume_memory_occupation(["weights"])
    running.engine.resume_memory_occupation(["weights"])
    running.engine.resume_memory_occupation(["kv_cache", "cuda_graph"])
    assert running.error_against(0) < 1e-5


def test_no_request_of_a_stranger_ends_the_engine(running: Running) -> None:
    normal = json.dumps({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}).encode()
    requests_to = [(name, path, json.dumps(body).encode()) for name, (path, body) in REQUESTS.items()]
    requests_to += [(name, "/generate", body) for name, body in RAW.items()]

    def answer(path: str, body: bytes) -> requests.Response:
        headers = {"Content-Type": "application/json", "Connection": "close"}
        return requests.post(f"{running.engine.get_url()}{path}", data=body, headers=headers, timeout=60)

    for name, path, body in requests_to:
        status = answer(path, body).status_code
        assert status in ({ODD_STATUS[name]} if name in ODD_STATUS else {200, 400, 422}), (name, status)
        assert answer("/generate", normal).status_code == 200, name


def test_a_client_that_hangs_up_and_asks_again_ends_nothing(running: Running) -> None:
    """Two requests with one id, and requests batched with refused ones, used to crash the detokenizer."""
    long = {"max_new_tokens": 400, "ignore_eos": True}
    bodies: list[dict[str, Any]] = [
        {"input_ids": PROMPT, "rid": "mine", "sampling_params": long},
        {"text": ["a", "b"], "rid": ["mine", "mine2"], "sampling_params": [long, {"top_k": 2**40}]},
    ]

    def hang_up(number: int) -> None:
        with suppress(requests.RequestException):
            requests.post(f"{running.engine.get_url()}/generate", json=bodies[number % 2], timeout=0.3)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(hang_up, range(64)))
    assert len(running.generate(8)["output_ids"]) == 8


def test_no_process_outlives_its_killed_owner(running: Running) -> None:
    """Runs last, because it ends the other tests' engine."""
    tree = [process for root in running.roots for process in family(root)]
    assert len(tree) >= 5, "a server with its scheduler and detokenizer, and a router with its watcher"
    running.owner.send_signal(signal.SIGKILL)
    running.owner.wait(timeout=60)
    _, alive = psutil.wait_procs(tree, timeout=60)
    assert alive == []


def family(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]
