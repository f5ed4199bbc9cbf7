"""A trainer that dies, without Ray: what is repeated, in which order, and when the run ends instead."""

from __future__ import annotations

import socket
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime.ext.recovery import trainer_recovery
from slime.ext.recovery.preemption import Preemption
from slime.ext.recovery.trainer_recovery import TrainerRecovery
from slime.ray import waiting
from slime.ray.waiting import Interrupted
from slime.utils.errors import EngineDiedError, HangError, StepError


class Trainer:
    """Weights are the list of trained rollouts; a checkpoint is a copy of it."""

    names = ["actor rank 0"]

    def __init__(self) -> None:
        self.weights: list[int] = []
        self.saved: dict[int, list[int]] = {}
        self.left_out: set[int] = set()
        self.copy_every, self.copied = 0, (-1, [])
        self.is_dead, self.num_starts = False, 1
        self.gpus = "those it was given"

    @property
    def checkpoints(self) -> Namespace:
        return Namespace(last=max(self.saved.keys() - self.left_out, default=None))

    def leave_out_checkpoints(self, number: int) -> None:
        self.copied = (-1, [])
        self.left_out.update(sorted(self.saved.keys() - self.left_out)[len(self.saved) - number :])

    def release(self) -> None:
        self.weights = []

    def create(self) -> int:
        self.is_dead, self.num_starts = False, self.num_starts + 1
        last = self.checkpoints.last
        if self.copied[0] >= 0:
            self.weights = list(self.copied[1])
            return self.copied[0] + 1
        self.weights = [] if last is None else list(self.saved[last])
        return 0 if last is None else last + 1

    def train(self, rollout_id: int, data: Any) -> None:
        if self.is_dead:
            raise RuntimeError("Connection closed by peer")
        if data == "NaN":
            raise StepError(f"rollout {rollout_id}, optimizer step 0: the loss is nan on rank 0")
        self.weights.append(data)
        if self.copy_every and (rollout_id + 1) % self.copy_every == 0:
            self.copied = rollout_id, list(self.weights)

    def save(self, rollout_id: int) -> None:
        if self.is_dead:
            raise RuntimeError("Connection closed by peer")
        self.saved[rollout_id] = list(self.weights)


@pytest.fixture
def trainer(monkeypatch) -> Trainer:
    made = Trainer()
    death = lambda names, timeout_s: EngineDiedError("actor rank 0 died") if made.is_dead else None  # noqa: E731
    monkeypatch.setattr(trainer_recovery, "find_death", death)
    monkeypatch.setattr(trainer_recovery, "cluster_has_accelerators", lambda: False)
    return made


@pytest.fixture
def notice(monkeypatch) -> Preemption:
    made = Preemption()
    monkeypatch.setattr(waiting.signal, "raise_signal", lambda number: made._on_signal(number, None))
    return made


def together(train: Any, *trainers: Any) -> Any:
    """The trainers of a job, which train like ``train``."""
    names = [name for trainer in trainers for name in trainer.names]
    return Namespace(actor=trainers[0], all=list(trainers), names=names, train=train)


def recovery(trainer: Trainer, notice: Preemption | None = None, **flags: Any) -> TrainerRecovery:
    args = Namespace(
        **{"trainer_recovery": "checkpoint", "max_recoveries": 3, "offload_rollout": False, "on_nan": ["stop"]} | flags
    )
    return TrainerRecovery(args, together(trainer.train, trainer), notice or Preemption())


@pytest.mark.parametrize("saves_every", [1, 2, 100])
@pytest.mark.parametrize("step", ["train", "save", "push"])
def test_a_step_is_taken_again_after_a_death_and_what_came_before_it(trainer, step, saves_every):
    job, pushed = recovery(trainer), []
    for rollout_id in range(6):
        if step == "train" and rollout_id in (1, 4):
            trainer.is_dead = True
        job.train(rollout_id, 10 * rollout_id)  # type: ignore[arg-type]
        if (rollout_id + 1) % saves_every == 0:
            trainer.is_dead = step == "save" and rollout_id in (1, 3)
            job.run(lambda id=rollout_id: trainer.save(id))
            job.record_saved()
        trainer.is_dead = step == "push" and rollout_id in (2, 5)
        job.run(lambda: trainer.train(-1, -1) if trainer.is_dead else pushed.append(list(trainer.weights)))
    assert pushed == [[10 * i for i in range(id + 1)] for id in range(6)]
    deaths = {"train": 2, "push": 2, "save": {1: 2, 2: 2, 100: 0}[saves_every]}[step]
    assert trainer.num_starts == 1 + deaths
    assert len(job._trained) == {1: 0, 2: 0, 100: 6}[saves_every]


@pytest.mark.parametrize("copy_every", [1, 2, 4])
def test_from_copies_in_memory_only_what_came_after_them_is_trained_again(trainer, copy_every):
    job = recovery(trainer, trainer_recovery="memory")
    trainer.copy_every, taken = copy_every, []
    job._train = lambda rollout_id, data: (trainer.train(rollout_id, data), taken.append(rollout_id))
    for rollout_id in range(6):
        trainer.is_dead = rollout_id == 3
        job.train(rollout_id, 10 * rollout_id)  # type: ignore[arg-type]
    again = {1: [], 2: [2], 4: [0, 1, 2]}[copy_every]
    assert taken == [0, 1, 2, *again, 3, 4, 5]
    assert trainer.weights == [0, 10, 20, 30, 40, 50]
    assert len(job._trained) == 6  # kept until a checkpoint, because the copies may be lost


def test_a_death_that_no_wait_noticed_is_found_and_made_good(trainer):
    job = recovery(trainer)
    job.train(0, 10)  # type: ignore[arg-type]
    job.restart_if_down()
    assert trainer.num_starts == 1
    trainer.is_dead = True
    job.restart_if_down()
    assert (trainer.num_starts, trainer.weights, job.is_down) == (2, [10], False)


def test_a_critic_and_its_actor_go_back_together(trainer, monkeypatch):
    critic, taken = Trainer(), []
    critic.names = ["critic rank 0"]

    def death(names: list[str], timeout_s: float) -> EngineDiedError | None:
        dead = [name for one in (trainer, critic) if one.is_dead for name in one.names if name in names]
        return EngineDiedError(f"{dead[0]} died") if dead else None

    def train(rollout_id: int, data: Any) -> None:
        for one in (critic, trainer):
            one.train(rollout_id, data)
        taken.append(rollout_id)

    monkeypatch.setattr(trainer_recovery, "find_death", death)
    job = TrainerRecovery(recovery(trainer).args, together(train, trainer, critic), Preemption())
    for rollout_id in range(5):
        critic.is_dead, trainer.is_dead = rollout_id == 1, rollout_id == 4  # the actor: after the critic's steps
        job.train(rollout_id, 10 * rollout_id)  # type: ignore[arg-type]
        if rollout_id == 2:
            for one in (critic, trainer):
                job.run(lambda one=one: one.save(2))
            job.record_saved()
    assert trainer.weights == critic.weights == [0, 10, 20, 30, 40]
    assert taken == [0, 0, 1, 2, 3, 3, 4] and trainer.num_starts == critic.num_starts == 3


def test_a_rollback_does_not_go_on_from_copies_in_memory(trainer):
    job = recovery(trainer, trainer_recovery="memory", on_nan=["rollback", "1"])
    trainer.copy_every = 1
    job.train(0, 7)  # type: ignore[arg-type]
    save(job, trainer, 0)
    job.train(1, 8)  # type: ignore[arg-type]
    job.train(2, "NaN")  # type: ignore[arg-type]
    assert trainer.weights == [7]


def test_a_wait_for_engines_on_the_same_gpus_goes_on_without_a_trainer(trainer):
    job, states = recovery(trainer, offload_rollout=True), []

    def wait() -> str:
        states.append(job.is_down)
        if trainer.is_dead and not job.is_down:
            raise EngineDiedError("actor rank 0 died")
        return "the rollout"

    trainer.is_dead = True
    assert job.run(wait, needs_trainer=False) == "the rollout"
    assert states == [False, True] and trainer.num_starts == 1
    job.run(lambda: trainer.train(0, 7))
    assert (trainer.num_starts, trainer.weights, job.is_down) == (2, [7], False)


@pytest.mark.parametrize("dies_over_the_save", [False, True])
def test_ranks_that_are_told_to_leave_save_first_and_start_elsewhere_without_a_step_repeated(
    trainer, notice, dies_over_the_save
):
    taken, avoided, told = [], [], [0]

    class Gpus:
        is_elsewhere = staticmethod(lambda rank: True)
        find_again = staticmethod(lambda: "others")
        avoid = staticmethod(lambda ranks, seconds: avoided.append((ranks, seconds)))

    def save() -> None:
        trainer.is_dead = dies_over_the_save and trainer.num_starts == 1
        job.run(lambda: trainer.save(job._trained[-1][0]))
        job.record_saved()

    def train(rollout_id: int, data: Any) -> None:
        taken.append(rollout_id)
        trainer.train(rollout_id, data)

    args = recovery(trainer, preemption_grace_s=30.0).args
    job = TrainerRecovery(args, together(train, trainer), notice, Gpus(), save)  # type: ignore[arg-type]
    notice.lets_go, notice.grace_s = job.can_let_go, 30.0
    job.train(0, 0)  # type: ignore[arg-type]
    with notice.deferred():
        notice.reached("actor rank 0")  # its step ends first
        job.train(1, 10)  # type: ignore[arg-type]

    def generate() -> str:
        notice.check()
        told[0] += 1
        return "the rollout"

    trainer_weights = list(trainer.weights)
    assert job.run(generate, needs_trainer=False) == "the rollout"
    job.train(2, 20)  # type: ignore[arg-type]
    assert trainer_weights == [0, 10] and trainer.weights == [0, 10, 20] and told == [1]
    assert trainer.num_starts == 2 and trainer.gpus == "others" and avoided == [([0], 30.0)]
    assert taken == ([0, 1, 0, 1, 2] if dies_over_the_save else [0, 1, 2])


@pytest.mark.parametrize(
    "flags", [{"trainer_recovery": "off"}, {"preemption_grace_s": 0.0}, {"offload_rollout": True}], ids=str
)
def test_a_rank_that_cannot_be_let_go_has_the_job_leave(trainer, notice, flags):
    job = recovery(trainer, notice, **{"preemption_grace_s": 30.0} | flags)
    notice.lets_go = job.can_let_go
    notice.reached("actor rank 0")
    with pytest.raises(Interrupted):
        notice.check()


def test_deaths_beyond_the_bound_end_the_run_and_tell_of_the_earlier_ones(trainer):
    job = recovery(trainer, max_recoveries=2)

    def die() -> None:
        trainer.is_dead = True
        raise EngineDiedError("actor rank 0 died")

    with pytest.raises(EngineDiedError, match="actor rank 0 died") as raised:
        job.run(die)
    assert trainer.num_starts == 3
    assert [note.split("):")[0] for note in raised.value.__notes__] == [
        "earlier within the hour (--max-recoveries 2"
    ] * 2


@pytest.mark.parametrize("mode", ["off", "checkpoint"])
def test_a_rank_that_hangs_is_treated_like_one_that_died(trainer, mode):
    job, tries = recovery(trainer, trainer_recovery=mode), []

    def hang_once() -> str:
        tries.append(1)
        if len(tries) == 1:
            raise HangError("actor rank 1 has not answered for 30 s")
        return "done"

    if mode == "off":
        with pytest.raises(HangError):
            job.run(hang_once)
    else:
        assert (job.run(hang_once), trainer.num_starts) == ("done", 2)


def in_vain() -> str:
    """Return gloo's error on a rank that waits in vain for another."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    stores = [dist.TCPStore("127.0.0.1", port, 2, is_master=not rank, wait_for_workers=False) for rank in range(2)]
    timeout = timedelta(seconds=1)
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: dist.ProcessGroupGloo(stores[rank], rank, 2, timeout), range(2)))
    with pytest.raises(RuntimeError) as caught:
        groups[0].allreduce(torch.ones(1)).wait()
    return str(caught.value)


def test_a_collective_that_a_rank_never_joins_is_a_hang(trainer):
    text, tries = in_vain(), []

    def late_once() -> str:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError(text)
        return "done"

    with pytest.raises(RuntimeError, match="Timed out waiting"):
        recovery(trainer, trainer_recovery="off").run(late_once)
    tries.clear()
    assert (recovery(trainer).run(late_once), trainer.num_starts) == ("done", 2)


@pytest.mark.parametrize(("mode", "is_dead"), [("off", True), ("checkpoint", False)])
def test_without_a_death_or_without_recovery_an_error_stays_what_it_is(trainer, mode, is_dead):
    trainer.is_dead = is_dead
    with pytest.raises(ZeroDivisionError):
        recovery(trainer, trainer_recovery=mode).run(lambda: 1 / 0)
    assert trainer.num_starts == 1


def save(job: TrainerRecovery, trainer: Trainer, rollout_id: int) -> None:
    job.run(lambda: trainer.save(rollout_id))
    job.record_saved()


@pytest.mark.parametrize(("back", "kept"), [(1, [0, 1, 2, 3]), (2, [0, 1]), (3, [])])
def test_a_rollback_leaves_the_rollout_out_and_what_came_after_the_checkpoint(trainer, back, kept):
    job = recovery(trainer, on_nan=["rollback", str(back)])
    for rollout_id in range(5):
        job.train(rollout_id, rollout_id)  # type: ignore[arg-type]
        if rollout_id in (1, 3):
            save(job, trainer, rollout_id)
    assert not job.must_save
    job.train(5, "NaN")  # type: ignore[arg-type]
    assert (trainer.weights, job.must_save, job.is_down) == (kept, True, False)
    trainer.is_dead = True  # before the save that makes it permanent
    save(job, trainer, 5)
    assert (trainer.weights, job.must_save) == (kept, False)
    trainer.is_dead = True
    job.train(6, 6)  # type: ignore[arg-type]
    assert trainer.weights == [*kept, 6]


def test_rollbacks_count_as_recoveries_and_without_them_the_number_ends_the_run(trainer):
    with pytest.raises(StepError, match="the loss is nan on rank 0"):
        recovery(trainer).train(0, "NaN")  # type: ignore[arg-type]
    assert trainer.num_starts == 1
    job = recovery(trainer, on_nan=["rollback", "1"], max_recoveries=1)
    job.train(0, "NaN")  # type: ignore[arg-type]
    with pytest.raises(StepError, match="rollout 1") as raised:
        job.train(1, "NaN")  # type: ignore[arg-type]
    assert "earlier within the hour (--max-recoveries 1): rollout 0" in raised.value.__notes__[0]
