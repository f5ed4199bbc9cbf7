"""The order of a weight push, whatever carries the bytes: :func:`push_weights` is the script, below it its steps.

    pause, flush -> begin -> buckets -> every engine acknowledges digests of what it holds -> commit -> continue

No engine serves the new version before the commit, and only engines that hold exactly what was sent are asked to
commit.  An engine that fails at any step is excluded and named in the report, and the others continue.  Where its
failure broke a broadcast, the buckets are sent again without it under a new push id.

All trainer ranks run the script in step; a failure on one is raised on all, so that none waits for one that is gone.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from functools import partial

import torch

from slime.ext.fast_push import engine_verbs as verbs
from slime.ext.fast_push.acknowledgements import check_acknowledgements
from slime.ext.fast_push.carrier import NO_BUCKET, Buckets, BucketSource, CarriedPush, Carrier
from slime.ext.fast_push.gathered_buckets import named_views
from slime.ext.fast_push.loaders import COMPARE, FILL_WITH_NAN, FIND_NAN, loader_of
from slime.ext.fast_push.manifest import Manifest
from slime.ext.fast_push.messages import encode
from slime.utils.errors import ProcessError, WeightSyncError
from slime.weights.push.engine import EngineProxy, Pending
from slime.weights.push.participants import PUSH_FAILURES, reason_of
from slime.weights.push.state import Push, PushReport
from slime.weights.push.wire import NOTHING, by_value

logger = logging.getLogger(__name__)

MAX_BLAMELESS_ATTEMPTS = 2
"""Number of broadcasts that may break without an engine to blame; every other time one engine fewer remains."""


def push_weights(asked: Push, source: Buckets, carrier: Carrier, plain: BucketSource | None = None) -> PushReport:
    """Have the engines serve the weights in ``source`` under the version of the push; collective.

    Args:
        asked: new; afterwards, also after an error, its participants say which engines were excluded and why.
        plain: whole tensors, gathered independently of ``source``, for every engine to compare with what it holds.

    Raises:
        WeightSyncError: no engine took them, or the trainer itself failed, or (with ``push.checks``) an engine holds
            other values, or weights that were not sent.
    """
    is_served = False
    push = CarriedPush.of(asked)
    push.read_folder = partial(_read_folder, push)
    try:
        if push.repacks:
            push.on_main_rank("asking for a push's needs", lambda: push.require_repacking(_without_loader(push)))
        buckets = carrier.prepare(push, source)
        with push.step("pause"):
            push.on_main_rank("pausing the engines", lambda: pause(push))
        if push.checks:
            kept = encode({"manifest": Manifest((), (), buckets.manifest.kept).to_json()})
            # A comparison of what was sent cannot see what was forgotten: that is still NaN afterwards.
            push.on_main_rank("filling the engines' weights with NaN", lambda: run_check(push, FILL_WITH_NAN, kept))
        with push.step("buckets"):
            send_buckets(push, buckets, carrier, by_stage=carrier.by_stage and buckets is source)
        with push.step("acknowledge"):
            push.on_main_rank("comparing digests", lambda: acknowledge(push, buckets.manifest))
        if push.checks:
            if plain is not None:
                compare(push, plain, by_stage=carrier.by_stage)
            push.on_main_rank("looking for weights that were not sent", lambda: run_check(push, FIND_NAN, kept))
        with push.step("commit"):
            push.on_main_rank(f"committing version {push.version}", lambda: commit(push))
        with push.step("continue"):
            push.on_main_rank(f"letting the engines continue with version {push.version}", push.continue_generation)
        is_served = True
    finally:
        carrier.finish(push, is_served=is_served)
    sent = [one for one in buckets.manifest.buckets if not (push.leaves_out_constants and one.is_constant)]
    report = push.report(
        num_tensors=len({part.name for bucket in sent for part in bucket.slices}),
        num_buckets=len(sent),
        num_bytes=sum(bucket.num_bytes for bucket in sent),
        num_attempts=push.num_attempts,
        engine_seconds=push.engine_seconds,
    )
    if push.ranks.rank == 0:
        logger.info(
            "Pushed weight version %s to %d engines: %d tensors, %.1f MiB in %d buckets, %.2f s.%s%s",
            push.version, report.num_engines, report.num_tensors, report.num_bytes / 2**20, report.num_buckets,
            report.elapsed_s, " They hold the frozen ones." if push.leaves_out_constants else "",
            " Every engine's weights equal the trainer's." if push.checks and plain is not None else "",
        )  # fmt: skip
    return report


def send_buckets(push: CarriedPush, buckets: Buckets, carrier: Carrier, *, by_stage: bool) -> None:
    """Send all buckets, again and again while engines break the broadcast of others."""

    @torch.no_grad()
    def walk() -> None:
        filled = buckets.iter_buckets(with_constants=not push.leaves_out_constants)
        while True:
            with push.step("fill"):
                bucket = next(filled, None)
            if bucket is None:
                break
            with push.step("send"):
                carrier.send(push, *bucket)
        push.digests = buckets.digests()

    while True:
        push.num_attempts += 1
        push.id = f"{push.ranks.from_main(uuid.uuid4().hex[:8])}-v{push.version}"
        push.must_repeat, push.digests = False, {}
        with push.step("begin"):
            push.on_main_rank("beginning the push", lambda: begin(push, buckets))
            push.leaves_out_constants = push.ranks.from_main(push.leaves_out_constants)
        carrier.open(push, buckets.manifest)
        while push.must_repeat:
            push.must_repeat = False
            carrier.open(push, buckets.manifest)
        push.in_turns(f"sending the tensors of version {push.version}", walk, by_stage=by_stage)
        if not push.must_repeat:
            return
        if push.num_attempts > len(push.participants.engines) + MAX_BLAMELESS_ATTEMPTS:
            raise WeightSyncError(
                f"weight version {push.version} was sent {push.num_attempts} times, and each time a broadcast "
                "broke; look at the network between the trainer and the engines"
            )
        logger.warning("push %s is repeated without the engines that broke it", push.id)


# What rank 0 asks of the engines at each step; those that fail are excluded


def pause(push: CarriedPush) -> None:
    """Pause the engines; those without our loader also undo their repacking."""
    push.pause()
    if push.repacks:
        push.undo_repacking(_without_loader(push))


def begin(push: CarriedPush, buckets: Buckets) -> None:
    """Tell what will come; from here an engine holds neither the old nor the new weights.

    Constant buckets are left out where all engines say that they hold just these.
    """
    engines, manifest, what = push.participants, buckets.manifest, "beginning the push"
    held = engines.ask(what, lambda one: _begin(one, manifest.id, push.id), _with_loader(push))
    if unknowing := [engine for engine in _with_loader(push) if held[engine.index] is None]:
        text = manifest.to_json()
        held |= engines.ask(what, lambda one: _begin(one, manifest.id, push.id, text), unknowing)
    wanted = {index: f"{digest:016x}" for index, digest in buckets.constant_digests.items()}
    push.leaves_out_constants = bool(wanted) and all(
        loader_of(engine) and all(held[engine.index][index] == digest for index, digest in wanted.items())
        for engine in engines.good
    )


def _begin(engine: EngineProxy, manifest_id: str, push_id: str, manifest: str | None = None) -> Pending:
    return engine.run(verbs.begin_weight_update, manifest_id, push_id, manifest, loader_of(engine))


def acknowledge(push: CarriedPush, manifest: Manifest) -> None:
    """Exclude every engine that does not hold just what was sent."""
    engines = push.participants
    answers = engines.ask(
        "acknowledging the push",
        lambda engine: engine.run(verbs.acknowledge_weight_update, push.id),
        _with_loader(push),
    )
    for answer in answers.values():
        for part, seconds in answer.get("seconds", {}).items():
            push.engine_seconds[part] = max(push.engine_seconds.get(part, 0.0), seconds)
    for index, reason in check_acknowledgements(answers, push.id, push.digests, manifest).items():
        engines.exclude(index, reason)


def commit(push: CarriedPush) -> None:
    """Call the new weights by their version, and see that it is so."""
    engines = push.participants
    if push.repacks:
        push.repack(_without_loader(push))
    engines.ask(
        "committing",
        lambda engine: engine.run(verbs.commit_weight_update, push.id, push.version),
        _with_loader(push),
    )
    push.require_version()


def run_check(
    push: CarriedPush, loader: str, text: str = NOTHING, engines: Sequence[EngineProxy] | None = None
) -> None:
    """Let engines run one of the weight checks; one that is gone is excluded.

    Args:
        loader: the check, as ``load_format``.

    Raises:
        WeightSyncError: the check found something.
    """
    for engine in push.participants.good if engines is None else engines:
        try:
            request = engine.run(verbs.run_weight_check, loader, text)
            request.wait(push.participants.clock.step_s)
        except ProcessError as error:
            push.participants.exclude(engine.index, f"{reason_of(error)} (in a check of its weights)")


def compare(push: CarriedPush, plain: BucketSource, *, by_stage: bool) -> None:
    """Let every engine compare whole tensors with what it holds; ranks that have the same ones share the engines."""
    ranks = push.ranks

    def is_own(engine: EngineProxy) -> bool:
        return ranks.is_source if by_stage else engine.index % ranks.world_size == ranks.rank

    def walk() -> None:
        for index, flat in plain.iter_buckets():
            engines = [engine for engine in push.participants.good if is_own(engine)]
            if index == NO_BUCKET or not engines or push.failures:
                continue
            text = by_value(named_views(flat, plain.manifest.buckets[index], plain.manifest))
            try:
                run_check(push, COMPARE, text, engines)
            except PUSH_FAILURES as error:
                push.failures.append(error)  # walk on through the buckets: the other ranks gather with this one

    push.in_turns(f"comparing the tensors of version {push.version}", walk, by_stage=by_stage)


def _read_folder(push: CarriedPush, engine: EngineProxy, folder: str) -> Pending:
    if loader_of(engine):
        return engine.run(verbs.receive_weight_folder, push.id, folder)
    return engine.update_weights_from_disk(folder, push.version)  # a stock engine serves it from here on


def _with_loader(push: CarriedPush) -> list[EngineProxy]:
    return [engine for engine in push.participants.good if loader_of(engine)]


def _without_loader(push: CarriedPush) -> list[EngineProxy]:
    return [engine for engine in push.participants.good if not loader_of(engine)]
