"""The loader as SGLang calls it, driven by an engine's verbs, without a server or an SGLang model."""

from __future__ import annotations

import base64
import json
import multiprocessing
import pickle
import sys
import threading
import time
from argparse import Namespace
from dataclasses import replace

import psutil
import pytest
import torch
from safetensors.torch import save_file

from slime.ext.fast_push import engine_verbs, incoming, weight_receiver
from slime.ext.fast_push.channel import WeightChannel
from slime.ext.fast_push.incoming import IncomingBytes, read_bucket
from slime.ext.fast_push.loaders import RECEIVER
from slime.ext.fast_push.manifest import Manifest, pack_whole
from slime.ext.fast_push.messages import PUSH_REPORT, encode
from slime.ext.fast_push.weight_receiver import ReceivingRank, receive
from slime.utils.errors import EngineError, WeightSyncError
from slime.utils.net import get_free_port
from slime.weights.push import wire
from slime.weights.stored_tensors import read_layout
from slime.weights.tensor_slice import TensorSlice
from tests.ext.fast_push.toy_models import Fused, Joined
from tests.loaded_model.buckets import cut_buckets, digests, fill, manifest_of, whole_buckets
from tests.loaded_model.engine import VerbsOfExtensions


class InProcess(VerbsOfExtensions):
    """An engine whose server is a function call: the models get every message in turn, as with a draft model."""

    def __init__(self, *models: torch.nn.Module) -> None:
        self.args = Namespace(weight_update_timeout_s=5.0)
        self.rank = self.node_rank = 0
        self.models = models
        self.version = "default"
        self.sent: list[int] = []

    def _request(self, method, path, payload=None, *, timeout_s=None):
        if path == "/update_weights_from_tensor":
            assert payload["load_format"] == RECEIVER and "weight_version" not in payload
            (text,) = payload["serialized_named_tensors"]
            self.sent.append(len(text))
            named_tensors = pickle.loads(base64.b64decode(text))
            for model in self.models:
                receive(model, named_tensors)
            return None
        if path == "/get_weights_by_name":
            return self.models[-1].get_weights_by_name(payload["name"], 100, tp_size=1)
        assert path == "/update_weight_version"
        if payload["abort_all_requests"]:
            raise EngineError("a commit aborts nothing")
        self.version = payload["new_version"]
        return None

    def push(self, manifest, flats, push_id, order=None, at_once=False):
        """Everything except the commit; returns the acknowledgement."""
        held = self.begin_weight_update(manifest.id, push_id)
        if held is None:
            held = self.begin_weight_update(manifest.id, push_id, manifest.to_json())
        self.held = held
        if at_once:
            self.receive_weight_buckets(push_id, {index: [handle_of(flat)] for index, flat in enumerate(flats)})
        else:
            for index in order or range(len(flats)):
                self.receive_weight_buckets(push_id, {index: [handle_of(flats[index])]})
        answer = self.acknowledge_weight_update(push_id)
        del answer["seconds"]
        return answer


BUFFERS: dict[str, torch.Tensor] = {}
FORK = multiprocessing.get_context("fork")
map_shared_memory = IncomingBytes.map


def handle_of(flat):
    """Replaces shared memory, which the end-to-end tests use."""
    BUFFERS[str(id(flat))] = flat
    return str(id(flat))


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(weight_receiver, "gather_over_ranks", lambda own: [own])
    monkeypatch.setattr(weight_receiver, "position_among_ranks", lambda: 0)
    monkeypatch.setattr(weight_receiver, "_RANK", ReceivingRank())
    monkeypatch.setattr(IncomingBytes, "map", lambda self, handle: BUFFERS[handle])


def made(layout=whole_buckets, factor=1.0, num=2):
    tensors = {name: tensor * factor for name, tensor in Fused.tensors().items()}
    manifest = layout(tensors, num)
    return tensors, manifest, fill(manifest, tensors)


def assert_holds(model, tensors):
    reference = Fused()
    reference.load_weights(list(tensors.items()))
    for name, value in reference.named_parameters():
        assert torch.equal(model.get_parameter(name), value), name


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("layout", [whole_buckets, cut_buckets])
def test_pushes_are_acknowledged_with_the_digests_of_what_came(layout, at_once):
    engine = InProcess(Fused())
    for number in range(3):
        tensors, manifest, flats = made(layout, 1 + number)
        answer = engine.push(manifest, flats, f"p{number}", at_once=at_once)
        assert answer == {"push_id": f"p{number}", "buckets": digests(manifest, flats), "problems": []}
        engine.commit_weight_update(f"p{number}", str(number))
        assert engine.version == str(number)
        assert_holds(engine.models[0], tensors)


def share_until_killed(pipe, flats):
    torch.multiprocessing.set_sharing_strategy("file_system")
    pipe.send([wire.handle_of(flat) for flat in flats])
    pipe.poll(60)


def take_pushes_of_two_trainers(manifest, flats):
    engine = InProcess(Fused())
    trainers = []
    for _ in range(2):
        ours, theirs = FORK.Pipe()
        trainers.append((FORK.Process(target=share_until_killed, args=(theirs, flats)), ours))
        trainers[-1][0].start()
    for push_id, (trainer, pipe) in enumerate(trainers):
        engine.begin_weight_update(manifest.id, f"p{push_id}", manifest.to_json())
        engine.receive_weight_buckets(f"p{push_id}", {index: [handle] for index, handle in enumerate(pipe.recv())})
        assert engine.acknowledge_weight_update(f"p{push_id}")["problems"] == []
        for process in [*psutil.Process(trainer.pid).children(recursive=True), trainer]:
            process.kill()  # also torch's manager of shared memory, as Ray does
        time.sleep(0.5)  # until they have gone


def test_an_engine_outlives_the_trainers_whose_memory_it_maps(monkeypatch):
    serializer = Namespace(deserialize=lambda text: pickle.loads(base64.b64decode(text)))
    for name in ("sglang", "sglang.srt", "sglang.srt.utils"):  # the real one takes seconds to import
        monkeypatch.setitem(sys.modules, name, Namespace(MultiprocessingSerializer=serializer))
    monkeypatch.setattr(IncomingBytes, "map", map_shared_memory)
    _, manifest, flats = made()
    engine = FORK.Process(target=take_pushes_of_two_trainers, args=(manifest, flats))
    engine.start()
    engine.join(60)
    assert engine.exitcode == 0


def test_a_manifest_travels_once():
    engine = InProcess(Fused())
    _, manifest, flats = made()
    engine.push(manifest, flats, "p0")
    engine.push(manifest, flats, "p1")
    ask, told, *buckets_and_end, again = engine.sent[:6]
    assert ask == again < told and len(buckets_and_end) == 3
    weight_receiver._RANK = ReceivingRank()  # the server was restarted
    assert engine.push(manifest, flats, "p2")["problems"] == []


def test_what_the_model_cannot_take_is_said_before_anything_is_sent():
    tensors, _, _ = made()
    del tensors["k"]
    tensors["o"] = torch.zeros(2, 2)
    engine = InProcess(Fused())
    with pytest.raises(WeightSyncError) as caught:
        engine.begin_weight_update(whole_buckets(tensors).id, "p", whole_buckets(tensors).to_json())
    message = str(caught.value)
    assert "engine 0 cannot take this push: o [2, 2] does not fit" in message
    assert "qkv: no tensor of the push fills 12 of 48 elements" in message
    assert "the engine has no place for 1 tensors of the push: other.layer" in message


def test_a_missing_bucket_is_neither_acknowledged_nor_committed():
    engine = InProcess(Fused())
    _, manifest, flats = made()
    answer = engine.push(manifest, flats, "p", order=[1])
    assert answer["buckets"] == ["", digests(manifest, flats)[1]]
    with pytest.raises(WeightSyncError, match="engine 0 will not serve push p as version 7"):
        engine.commit_weight_update("p", "7")
    assert engine.version == "default"


def test_each_gpu_of_an_engine_begins_with_another_bucket(monkeypatch):
    engine = InProcess(Fused())
    engine.tp_size, engine.unfinished_push = 3, "p"
    told = []
    monkeypatch.setattr(engine_verbs, "_send", lambda engine, verb, push_id, *, by_gpu: told.extend(by_gpu))
    engine.receive_weight_buckets("p", {4: ["4a", "4b", "4c"], 5: ["5a", "5b", "5c"]})
    assert [gpu["payload"] for gpu in told] == [[(4, "4a"), (5, "5a")], [(5, "5b"), (4, "4b")], [(4, "4c"), (5, "5c")]]


@pytest.mark.parametrize("verb", ["receive_weight_buckets", "acknowledge_weight_update", "commit_weight_update"])
def test_another_push_is_refused_by_name(verb):
    engine = InProcess(Fused())
    _, manifest, flats = made()
    arguments = {"receive_weight_buckets": ({0: [handle_of(flats[0])]},), "commit_weight_update": ("1",)}
    with pytest.raises(WeightSyncError, match="engine 0 is asked about push b; none was begun"):
        getattr(engine, verb)("b", *arguments.get(verb, ()))
    engine.begin_weight_update(manifest.id, "a", manifest.to_json())
    with pytest.raises(WeightSyncError, match="engine 0 is asked about push b; last begun: a"):
        getattr(engine, verb)("b", *arguments.get(verb, ()))


def test_a_stray_message_of_another_push_is_refused_and_harms_nothing():
    engine = InProcess(Fused())
    tensors, manifest, flats = made()
    engine.begin_weight_update(manifest.id, "a", manifest.to_json())
    message = {"verb": "receive_weight_bucket", "push_id": "b", "id": "1", "bucket_index": 0, "group_name": None}
    receive(engine.models[0], pickle.loads(base64.b64decode(encode(message))))
    (report,) = engine.models[0].get_weights_by_name(PUSH_REPORT)
    assert json.loads(report)["problems"] == ["receive_weight_bucket: push b is not the one that was begun last, a"]
    assert engine.push(manifest, flats, "a")["problems"] == []
    assert_holds(engine.models[0], tensors)


def test_a_buffer_of_the_wrong_size_is_a_problem():
    engine = InProcess(Fused())
    _, manifest, flats = made()
    answer = engine.push(manifest, [flats[0], flats[1][:16]], "p")
    assert answer["buckets"][1] == ""
    assert "its buffer is [16] of torch.uint8" in answer["problems"][0]


def test_the_ack_is_void_when_a_bucket_comes_after_it():
    engine = InProcess(Fused())
    _, manifest, flats = made()
    engine.push(manifest, flats, "p")
    engine.receive_weight_buckets("p", {0: [handle_of(flats[0])]})
    with pytest.raises(WeightSyncError, match="will not serve push p"):
        engine.commit_weight_update("p", "7")


def test_an_engine_must_not_serve_from_begin_to_commit():
    engine = InProcess(Fused())
    _, manifest, flats = made()
    engine.refuse_unfinished_push()
    engine.push(manifest, flats, "p")
    with pytest.raises(WeightSyncError, match="engine 0 holds the unfinished push p and must not serve"):
        engine.refuse_unfinished_push()
    engine.commit_weight_update("p", "7")
    engine.refuse_unfinished_push()


class Draft(torch.nn.Module):
    """Takes its own part and the target's embedding, which it shares."""

    def __init__(self, target: Fused) -> None:
        super().__init__()
        self.embed = target.embed
        self.other = torch.nn.Parameter(torch.zeros(3), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "other.layer":
                self.other.data.copy_(tensor)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_draft_model_takes_its_part_and_the_target_the_rest(at_once):
    target = Fused()
    draft = Draft(target)
    engine = InProcess(draft, target)
    for number in range(2):
        tensors, manifest, flats = made(factor=1 + number)
        answer = engine.push(manifest, flats, f"p{number}", at_once=at_once)
        assert answer == {"push_id": f"p{number}", "buckets": digests(manifest, flats), "problems": []}
        assert torch.equal(draft.other.data, tensors["other.layer"])
        assert_holds(target, tensors)


def test_a_draft_models_own_missing_tensor_is_named():
    target = Fused()
    tensors, _, _ = made()
    del tensors["other.layer"]
    with pytest.raises(WeightSyncError, match="other: no tensor of the push fills 3 of 3 elements"):
        InProcess(Draft(target), target).begin_weight_update(
            whole_buckets(tensors).id, "p", whole_buckets(tensors).to_json()
        )


def test_buckets_arrive_over_a_group(monkeypatch):
    """The trainer is rank 0 in this thread; the engine joins with its model's rank."""
    monkeypatch.setattr(incoming, "rank_in_engine", lambda: 0)
    engine = InProcess(Joined())
    tensors = {"q_a": torch.rand(2, 4), "kv_a": torch.rand(3, 4)}
    manifest = whole_buckets(tensors, 2)
    flats = fill(manifest, tensors)
    port = get_free_port(21000)
    place = {"backend": "gloo", "world_size": 2, "timeout_s": 20.0}
    joined = threading.Thread(target=engine.join_weight_group, args=("127.0.0.1", port, 1, 2, "g", "gloo"))
    joined.start()
    channel = WeightChannel("127.0.0.1", port, rank=0, **place)
    joined.join(20)
    engine.begin_weight_update(manifest.id, "p", manifest.to_json())
    for index, flat in enumerate(flats):
        taken = threading.Thread(target=engine.receive_weight_bucket, args=("p", index, "g"))
        taken.start()
        channel.broadcast(flat)
        taken.join(20)
    answer = engine.acknowledge_weight_update("p")
    assert answer["buckets"] == digests(manifest, flats) and answer["problems"] == []
    assert torch.equal(engine.models[0].a.data, torch.cat(list(tensors.values())))
    engine.leave_weight_group("g")
    engine.leave_weight_group("g")
    channel.leave()
    engine.receive_weight_bucket("p", 0, "g")
    assert "not in weight group 'g'" in engine.acknowledge_weight_update("p")["problems"][0]


def test_ranks_that_disagree_are_a_problem(monkeypatch):
    engine = InProcess(Fused())
    _, manifest, flats = made()

    def two_ranks(own):
        other = {index: bytes([digests[0] ^ 1]) + digests[1:] for index, digests in own["digests"].items()}
        taken = own["taken"] and [b"\1" * len(mask) for mask in own["taken"]]
        return [dict(own, taken=taken), dict(own, taken=taken, digests=other, problems=["o: wrong"] * bool(other))]

    monkeypatch.setattr(weight_receiver, "gather_over_ranks", two_ranks)
    engine.begin_weight_update(manifest.id, "p", manifest.to_json())
    for index, flat in enumerate(flats):
        engine.receive_weight_buckets("p", {index: [handle_of(flat)]})
    problems = engine.acknowledge_weight_update("p")["problems"]
    assert problems[0] == "rank 1: o: wrong"
    names = [bucket.slices[0].name for bucket in manifest.buckets]
    differing = [f"rank 1 received different bytes of {name} than earlier ranks" for name in names]
    assert problems[1:] == differing


def with_constant_embedding(number=0):
    """All tensors except the embedding times ``1 + number``; the embedding in a constant bucket; at first a full
    push."""
    tensors = {name: tensor * (1 + number * (name != "embed")) for name, tensor in Fused.tensors().items()}
    names = [[(name, TensorSlice.whole(t.shape)) for name, t in tensors.items() if name != "embed"]]
    manifest = manifest_of(tensors, [*names, [("embed", TensorSlice.whole(tensors["embed"].shape))]])
    trained, constant = manifest.buckets
    manifest = replace(manifest, buckets=(trained, replace(constant, is_constant=True)))
    return tensors, manifest, fill(manifest, tensors)


def test_a_constant_bucket_need_not_come_again_and_is_acknowledged_with_the_rest():
    engine = InProcess(Fused())
    for number in range(3):
        tensors, manifest, flats = with_constant_embedding(number)
        answer = engine.push(manifest, flats, f"p{number}", order=[0, 1] if number == 0 else [0])
        assert engine.held == ["", digests(manifest, flats)[1] if number else ""]
        assert answer == {"push_id": f"p{number}", "buckets": digests(manifest, flats), "problems": []}
        engine.commit_weight_update(f"p{number}", str(number))
        assert_holds(engine.models[0], tensors)


@pytest.mark.parametrize("loss", ["overwritten", "in other memory", "another engine"])
def test_an_engine_that_lost_a_constant_bucket_says_so_and_serves_nothing_without_it(loss):
    engine = InProcess(Fused())
    tensors, manifest, flats = with_constant_embedding()
    engine.push(manifest, flats, "p0")
    if loss == "overwritten":
        engine.models[0].embed.data[0, 0] += 1
    elif loss == "in other memory":
        engine.models[0].embed.data = torch.zeros_like(engine.models[0].embed)
    else:
        engine.models = (Fused(),)
        weight_receiver._RANK = ReceivingRank()
    answer = engine.push(manifest, flats, "p1", order=[0])
    assert engine.held == ["", ""] and answer["buckets"] == [digests(manifest, flats)[0], ""]
    with pytest.raises(WeightSyncError, match="engine 0 will not serve push p1"):
        engine.commit_weight_update("p1", "1")
    answer = engine.push(manifest, flats, "p2")
    assert answer["buckets"] == digests(manifest, flats) and not answer["problems"]
    assert_holds(engine.models[0], tensors)
    engine.push(manifest, flats, "p3", order=[0])
    assert engine.held == ["", digests(manifest, flats)[1]]


def test_a_constant_bucket_whose_memory_another_tensor_shares_is_never_held():
    engine = InProcess(Fused())
    tensors, _, _ = made()
    parts = [[n for n in tensors if n != "q"], ["q"]]
    manifest = manifest_of(tensors, [[(n, TensorSlice.whole(tensors[n].shape)) for n in part] for part in parts])
    trained, constant = manifest.buckets
    manifest = replace(manifest, buckets=(trained, replace(constant, is_constant=True)))
    for push_id in ("p0", "p1"):
        assert engine.push(manifest, fill(manifest, tensors), push_id)["problems"] == []
        assert engine.held == ["", ""]


def test_a_constant_bucket_is_held_by_all_ranks_of_an_engine_or_by_none(monkeypatch):
    engine, second_lacks_it = InProcess(Fused()), [False]
    _, manifest, flats = with_constant_embedding()

    def two_ranks(own):
        one = own | {"taken": own["taken"] and [b"\1" * len(mask) for mask in own["taken"]]}
        return [one, one | {"holds_constants": own["holds_constants"] and not second_lacks_it[0]}]

    monkeypatch.setattr(weight_receiver, "gather_over_ranks", two_ranks)
    engine.push(manifest, flats, "p0")
    engine.push(manifest, flats, "p1", order=[0])
    assert engine.held == ["", digests(manifest, flats)[1]]
    second_lacks_it[0] = True
    engine.push(manifest, flats, "p2")
    assert engine.held == ["", ""]


@pytest.mark.parametrize("answer", [None, [], ["{"], ["[]"], ["3"], ['{"push_id": "p", "buckets": []}']])
def test_what_is_no_report_of_a_loader_is_an_error_of_the_engine(monkeypatch, answer):
    engine = InProcess(Fused())
    monkeypatch.setattr(engine, "_request", lambda method, path, *_, **__: answer)
    with pytest.raises(EngineError, match="engine 0 answered begin_weight_update with .*not a report of its loader"):
        engine.begin_weight_update("m", "p")


@pytest.mark.parametrize("stored", [torch.zeros(2, 3, dtype=torch.float16), torch.zeros(3, 2), None])
def test_a_bucket_takes_no_other_tensor_than_the_manifests(tmp_path, stored):
    entries, bucket = pack_whole([("weight", (2, 3), torch.float32)])
    save_file({"weight" if stored is not None else "other": torch.zeros(1) if stored is None else stored},
              tmp_path / "model.safetensors")  # fmt: skip
    with pytest.raises(WeightSyncError, match=r"weight should be float32 \[2, 3\], but on disk is"):
        read_bucket(read_layout(tmp_path), bucket, Manifest(tuple(entries), (bucket,)), [0])
