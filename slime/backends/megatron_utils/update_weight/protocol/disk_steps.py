"""What is asked of engines when weights lie on disk, and a whole push of them by one process without a trainer.

The sender asks on its rank 0.  With ``--release-train`` the trainer has ended by then: the driver asks.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime.backends.megatron_utils import sglang
from slime.backends.megatron_utils.update_weight.protocol import push_steps
from slime.backends.megatron_utils.update_weight.protocol.push import Push
from slime.backends.megatron_utils.update_weight.protocol.roster import PushClock, Roster
from slime.weights.manifest import Manifest
from slime.weights.receiver import Pending, WeightReceiver
from slime.weights.versions import version_folder


@dataclass(frozen=True, slots=True)
class WrittenVersion:
    """A version on disk, and all that it takes to have it served."""

    root: Path
    """``--update-weight-disk-dir``."""
    number: int
    manifest: Manifest
    digests: Mapping[int, int]
    """Of every bucket of the manifest."""
    is_copied: bool
    """Every host makes a copy of its own first (``--update-weight-local-checkpoint-dir``)."""
    repacks: bool
    """The engines repack quantised weights around a push."""
    metrics: Mapping[str, float]


def fetch(version: WrittenVersion, roster: Roster, clock: PushClock, *, rebuild: bool = False) -> dict[int, str]:
    """Bring the version to all hosts, and give the folder that each engine will read.

    The engines go on serving.  ``roster`` must be one for this alone: whoever fails here is to be fenced in the push,
    once it is paused.
    """
    if not version.is_copied:
        shared = str(version_folder(version.root, version.number))
        return {engine.index: shared for engine in roster.good}
    return roster.ask(
        f"pulling version {version.number}", lambda engine: engine.pull_weights(version.number, rebuild), clock
    )


def read(push: Push, folders: Mapping[int, str]) -> None:
    """Let every engine read the version; one without our loader calls it served at once."""

    def ask(engine: WeightReceiver) -> Pending:
        folder = folders[engine.index]
        if engine.acknowledges:
            return engine.receive_weight_folder(push.id, folder)
        return engine.update_weights_from_disk(folder, push.version)

    push.roster.ask(f"reading version {push.version}", ask, push.clock)


def deliver(
    version: WrittenVersion, receivers: Sequence[WeightReceiver], *, timeout_s: float, looks_for_gaps: bool = False
) -> Push:
    """Have the engines serve a version, in the order of every push; gives the push with those it left out.

    Args:
        version: on disk.
        receivers: the engines.
        timeout_s: deadline of all of it.
        looks_for_gaps: overwrite all weights first, and see that each was written (``--check-weight-update-equal``).

    Raises:
        WeightSyncError: a weight was not written.
    """
    push = Push(str(version.number), Roster(receivers), PushClock(timeout_s))
    push.digests, push.num_attempts = dict(version.digests), 1
    push.id = f"{uuid.uuid4().hex[:8]}-v{push.version}"
    fetching = Roster(receivers)
    folders = fetch(version, fetching, push.clock)
    push_steps.pause(push, repacks=version.repacks)
    for index, reason in fetching.reasons.items():
        push.roster.fence(index, reason)
    if looks_for_gaps:
        push_steps.run_check(push, sglang.POISON_LOADER)
    push_steps.begin(push, version.manifest)
    read(push, folders)
    push_steps.acknowledge(push, version.manifest)
    if looks_for_gaps:
        push_steps.run_check(push, sglang.FIND_POISON_LOADER)
    push_steps.commit(push, repacks=version.repacks)
    push_steps.resume(push)
    return push
