"""The steps of a verified push, independent of the carrier: :func:`push_weights` runs the functions below it.

    pause, flush -> begin -> buckets -> every engine acknowledges digests of what it holds -> commit -> continue

No engine serves the new version before the commit, and only engines that hold exactly what was sent are asked to
commit.  An engine that fails at any step is excluded and named in the report, and the others continue.  If its failure
broke a broadcast, the buckets are sent again without it under a new push id.

All trainer ranks run the steps together.  A failure on one rank is raised on all, so that none waits for a lost rank.
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
"""Number of broadcasts that may break without an engine to blame; every other break excludes an engine."""


def push_weights(asked: Push, source: Buckets, carrier: Carrier, plain: BucketSource | None = None) -> PushReport:
    """Make the engines serve the weights in ``source`` under the push's version.  Collective.

    Args:
        asked: a new push.  Afterwards, even after an error, its participants tell which engines were excluded and why.
        source: the buckets to send.
        carrier: sends the buckets.
        plain: whole tensors, gathered independently of ``source``, that every engine compares with its weights.

    Raises:
        WeightSyncError: no engine took the weights; the trainer itself failed; or (with ``asked.checks``) an engine
            holds different values, or has weights that were not sent.
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
            # Comparing what was sent cannot reveal a weight that was not sent; that is still NaN afterwards.
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
        logger.log(
            push.log_level,
            "Pushed weight version %s to %d engines: %d tensors, %.1f MiB in %d buckets, %.2f s.%s%s",
            push.version, report.num_engines, report.num_tensors, report.num_bytes / 2**20, report.num_buckets,
            report.elapsed_s, " They hold the frozen ones." if push.leaves_out_constants else "",
            " Every engine's weights equal the trainer's." if push.checks and plain is not None else "",
        )  # fmt: skip
    return report


def send_buckets(push: CarriedPush, buckets: Buckets, carrier: Carrier, *, by_stage: bool) -> None:
    """Send all buckets, repeatedly if an engine's failure breaks a broadcast."""

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
        logger.warning("Repeating push %s without the engines that broke it", push.id)


# Requests of rank 0 to the engines at each step; engines that fail are excluded


def pause(push: CarriedPush) -> None:
    """Pause the engines; those without slime's loader also undo their repacking."""
    push.pause()
    if push.repacks:
        push.undo_repacking(_without_loader(push))


def begin(push: CarriedPush, buckets: Buckets) -> None:
    """Announce the manifest; from here on an engine holds neither the old nor the new weights.

    Constant buckets are omitted if all engines report that they hold exactly these.
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
    """Exclude every engine that does not hold exactly what was sent."""
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
    """Commit the new version, and exclude engines that then report another."""
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
    """Run a weight check on engines; exclude engines that are gone.

    Args:
        loader: the check, as ``load_format``.

    Raises:
        WeightSyncError: the check found a problem.
    """
    for engine in push.participants.good if engines is None else engines:
        try:
            request = engine.run(verbs.run_weight_check, loader, text)
            request.wait(push.participants.clock.step_s)
        except ProcessError as error:
            push.participants.exclude(engine.index, f"{reason_of(error)} (in a check of its weights)")


def compare(push: CarriedPush, plain: BucketSource, *, by_stage: bool) -> None:
    """Make every engine compare whole tensors with its weights; ranks with the same tensors share the engines."""
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
                push.failures.append(error)  # keep iterating: other ranks gather buckets together with this one

    push.in_turns(f"comparing the tensors of version {push.version}", walk, by_stage=by_stage)


def _read_folder(push: CarriedPush, engine: EngineProxy, folder: str) -> Pending:
    if loader_of(engine):
        return engine.run(verbs.receive_weight_folder, push.id, folder)
    return engine.update_weights_from_disk(folder, push.version)  # a stock engine serves it at once


def _with_loader(push: CarriedPush) -> list[EngineProxy]:
    return [engine for engine in push.participants.good if loader_of(engine)]


def _without_loader(push: CarriedPush) -> list[EngineProxy]:
    return [engine for engine in push.participants.good if not loader_of(engine)]
