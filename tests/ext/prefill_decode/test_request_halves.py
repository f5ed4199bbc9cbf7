"""Halves of requests at a prefill and a decode engine, with SGLang's own tables, senders and ZMQ sockets."""

from __future__ import annotations

import pkgutil
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from slime.backends.sglang_utils import cpu_shim

cpu_shim.install()
from sglang.srt.disaggregation.base.conn import KVPoll  # noqa: E402 - after the shim
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVSender  # noqa: E402

from slime.ext.prefill_decode import request_halves as halves  # noqa: E402

ROOM = 7


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The hooks' clock; their tables start empty."""
    time = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(halves, "time", SimpleNamespace(monotonic=lambda: time.now_s))
    for name in ("_ended", "_alone", "_guards"):
        monkeypatch.setattr(halves, name, type(getattr(halves, name))())
    return time


class Prefill:
    """The manager of a prefill engine: messages to decode engines, and SGLang's tables under the hooks."""

    is_dummy_cp_rank, bootstrap_port, server_args = False, 9000, SimpleNamespace(dp_size=1)

    def __init__(self) -> None:
        self.request_status: dict[int, int] = {}
        self.transfer_infos: dict[int, dict[str, Any]] = {}
        self.failure_records: dict[int, str] = {}
        self.failure_lock = threading.Lock()
        self.told: list[tuple[int, int]] = []

    def update_status(self, room: int, status: int) -> None:
        halves.update_status(CommonKVManager.update_status, self, room, status)

    def check_status(self, room: int) -> int:
        return halves.check_status(CommonKVManager.check_status, self, room)

    def record_failure(self, room: int, reason: str) -> None:
        halves.record_failure(CommonKVManager.record_failure, self, room, reason)

    def sync_status_to_decode_endpoint(self, endpoint: str, port: int, room: int, status: int, rank: int) -> None:
        self.told.append((room, status))

    def decode_half_comes(self, room: int = ROOM) -> None:
        """Do what SGLang's bootstrap thread does when it gets cache locations."""
        self.transfer_infos[room] = {"session": SimpleNamespace(endpoint="10.0.0.2", dst_port=1, is_dummy=False)}
        self.update_status(room, KVPoll.WaitingForInput)

    def own_half_comes(self, room: int = ROOM) -> CommonKVSender:
        sender = CommonKVSender.__new__(CommonKVSender)
        CommonKVSender.__init__(sender, self, "10.0.0.1:9000", room, [0], 0)  # type: ignore[arg-type]
        halves.begin_sender(None, sender)
        return sender


def abort(sender: CommonKVSender) -> None:
    """End a request as SGLang ends an aborted one."""
    CommonKVSender.abort(sender)
    halves.end_sender(None, sender)
    clear(sender)


def clear(sender: CommonKVSender) -> None:
    halves.clear_sender(sender)
    CommonKVSender.clear(sender)


@pytest.mark.parametrize("decode_is_first", [True, False])
def test_a_decode_engine_is_told_once_that_the_prefill_half_was_aborted(decode_is_first: bool) -> None:
    prefill = Prefill()
    if decode_is_first:
        prefill.decode_half_comes()
    sender = prefill.own_half_comes()
    abort(sender)
    if not decode_is_first:
        prefill.decode_half_comes()
    assert prefill.told == [(ROOM, KVPoll.Failed)]
    assert not prefill.request_status and not prefill.transfer_infos and not halves._alone


def test_a_decode_half_that_comes_between_an_abort_and_its_end_is_told() -> None:
    prefill = Prefill()
    sender = prefill.own_half_comes()
    CommonKVSender.abort(sender)
    halves.end_sender(None, sender)
    prefill.decode_half_comes()
    assert prefill.check_status(ROOM) == KVPoll.Failed
    clear(sender)
    assert prefill.told == [(ROOM, KVPoll.Failed)] and not prefill.request_status


def test_a_prefill_half_that_comes_after_the_abort_of_the_other_fails() -> None:
    prefill = Prefill()
    socket = halves.GuardedSocket("tcp://10.0.0.2:1", SimpleNamespace(setsockopt=print, send_multipart=print))
    socket.send_multipart([b"ABORT_ACK", str(ROOM).encode()])
    prefill.own_half_comes()
    assert prefill.check_status(ROOM) == KVPoll.Failed and not prefill.told
    assert prefill.failure_records[ROOM]


def test_a_decode_engine_learns_that_the_prefill_half_never_came(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, in_time, late = Prefill(), 8, 9
    queue = SimpleNamespace(kv_manager=prefill)
    prefill.decode_half_comes()
    prefill.decode_half_comes(in_time)
    clock.now_s += 29
    prefill.own_half_comes(in_time)
    prefill.decode_half_comes(late)
    halves.end_lonely_rooms(queue, patience_s=30.0)
    assert not prefill.told
    clock.now_s += 1
    halves.end_lonely_rooms(queue, patience_s=30.0)
    assert prefill.told == [(ROOM, KVPoll.Failed)]
    assert "10.0.0.2:1 waits for room 7" in caplog.text and "port 9000" in caplog.text
    prefill.own_half_comes()
    assert [prefill.check_status(room) for room in (ROOM, in_time, late)] == [
        KVPoll.Failed,
        KVPoll.WaitingForInput,
        KVPoll.WaitingForInput,
    ]


def test_a_request_that_ends_well_is_not_called_failed() -> None:
    prefill = Prefill()
    sender = prefill.own_half_comes()
    prefill.decode_half_comes()
    sender.conclude_state = KVPoll.Success
    clear(sender)
    assert not prefill.told and not halves._alone


def test_an_abort_tells_of_requests_that_wait_and_lets_transfers_end() -> None:
    prefill = Prefill()
    waiting, moving = ({"disagg_kv_sender": prefill.own_half_comes(room)} for room in (ROOM, 8))
    for room in (ROOM, 8):
        prefill.decode_half_comes(room)
    scheduler = SimpleNamespace(
        disaggregation_mode=SimpleNamespace(value="prefill"),
        waiting_queue=[SimpleNamespace(**waiting), SimpleNamespace(disagg_kv_sender=None)],
        disagg_prefill_inflight_queue=[SimpleNamespace(**moving)],
    )
    in_flight = scheduler.disagg_prefill_inflight_queue
    senders = {id(waiting["disagg_kv_sender"])}

    def original(scheduler: Any, request: Any) -> None:
        scheduler.waiting_queue.clear()
        for req in scheduler.disagg_prefill_inflight_queue:
            req.disagg_kv_sender.abort()

    def hooked_abort(sender: CommonKVSender) -> None:
        assert id(sender) in senders
        CommonKVSender.abort(sender)
        halves.end_sender(None, sender)

    waiting["disagg_kv_sender"].abort = lambda: hooked_abort(waiting["disagg_kv_sender"])
    halves.abort_in_scheduler(original, scheduler, None)
    assert prefill.told == [(ROOM, KVPoll.Failed)]
    assert scheduler.disagg_prefill_inflight_queue is in_flight
    assert prefill.check_status(8) == KVPoll.WaitingForInput


def test_two_threads_at_one_socket_lose_and_mix_no_message() -> None:
    """Without a guard, the transfer thread and the thread that acknowledges aborts corrupt a tenth of their
    messages."""
    count = 3000
    messages = {"done": [b"7", b"4", b"0"], "aborted": [b"ABORT_ACK", b"7"]}
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        push.connect(f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}")
        guarded = halves._guarded("here", push)
        assert halves.guard_prefill_socket(push, None, "here") is guarded

        def send(name: str) -> None:
            for _ in range(count):
                guarded.send_multipart(messages[name])

        threads = [threading.Thread(target=send, args=(name,), daemon=True) for name in messages]
        for thread in threads:
            thread.start()
        pull.setsockopt(zmq.RCVTIMEO, 60_000)
        got = Counter(tuple(pull.recv_multipart()) for _ in range(2 * count))
        for thread in threads:
            thread.join()
    assert got == {tuple(parts): count for parts in messages.values()}


def test_an_engine_that_has_gone_holds_up_no_sender(caplog: pytest.LogCaptureFixture) -> None:
    """Without a guard, a decode engine's scheduler waits forever once its prefill engine is killed."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as nobody_reads:
        guarded, lock = halves.guard_decode_socket((nobody_reads, "its lock"), object, "tcp://10.0.0.1:1")
        nobody_reads.setsockopt(zmq.SNDTIMEO, 1)
        guarded.send_multipart([b"ABORT", b"7"])
        nobody_reads.setsockopt(zmq.SNDTIMEO, -1)  # forever
        guarded.send_multipart([b"ABORT", b"8"])
    assert lock == "its lock" and "10.0.0.1:1 is dropped" in caplog.text


def test_a_room_that_another_thread_forgets_ends_no_thread() -> None:
    prefill, decode = Prefill(), SimpleNamespace(required_prefill_response_num_table={})
    halves.guard_tables(None, prefill)
    halves.guard_tables(None, decode)
    assert prefill.transfer_infos[ROOM] == {} and prefill.transfer_infos.pop(ROOM) is None
    assert prefill.check_status(ROOM) == KVPoll.Failed and decode.required_prefill_response_num_table[ROOM] == 0
    prefill.record_failure(ROOM, "nobody is left to read this")
    assert not prefill.failure_records


def test_every_hook_has_a_target_in_the_tested_sglang() -> None:
    targets = [halves.LONELY_ROOMS, *(target for target, *_ in halves.HOOKS)]
    assert all(callable(pkgutil.resolve_name(target)) for target in targets)
    assert (halves.FAILED, halves.WAITING) == (KVPoll.Failed, KVPoll.WaitingForInput)
