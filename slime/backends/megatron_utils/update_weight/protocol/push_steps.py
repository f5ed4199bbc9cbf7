"""What is asked of the engines at each step of a push; rank 0 does it for all.

Every function asks all engines that are still in the push at once, and fences those that fail.
"""

from __future__ import annotations

from collections.abc import Sequence

from slime.backends.megatron_utils import sglang
from slime.backends.megatron_utils.update_weight.protocol.acknowledgements import check_acknowledgements
from slime.backends.megatron_utils.update_weight.protocol.push import Push
from slime.backends.megatron_utils.update_weight.protocol.roster import reason_of
from slime.utils.errors import ProcessError, WeightSyncError
from slime.weights.manifest import Manifest
from slime.weights.receiver import WeightReceiver


def require_repacking(push: Push) -> None:
    """See that the engines can undo and redo their own repacking of quantised weights, before anything is paused.

    Raises:
        WeightSyncError: an engine cannot.
    """
    # Neither undo nor redo: an engine that has the endpoint does nothing.
    what = {"restore_weights_before_load": False, "post_process_quantization": False}
    for engine in push.roster.good:
        try:
            engine.post_process_weights(**what).wait(push.clock.step_s)
        except ProcessError as error:
            raise WeightSyncError(
                f"--hf-checkpoint holds compressed-tensors weights, which engines repack when they load them; engine "
                f"{engine.index} cannot undo that for a push ({error}). Stock SGLang has no /post_process_weights; "
                "use an SGLang that has it, or an fp8 checkpoint (tools/convert_hf_to_fp8.py)"
            ) from error


def pause(push: Push, *, repacks: bool) -> None:
    """Stop generating and forget the prefix cache.

    Args:
        push: under way.
        repacks: the engines undo their own repacking of quantised weights.
    """
    push.roster.ask("pausing", lambda engine: engine.pause_generation(), push.clock)
    push.roster.ask("flushing its cache", lambda engine: engine.flush_cache(), push.clock)
    if repacks:
        _repack(push, restore_weights_before_load=True, post_process_quantization=False)


def begin(push: Push, manifest: Manifest) -> None:
    """Tell what will come; from here an engine holds neither the old nor the new weights."""
    text = manifest.to_json()
    push.roster.ask(
        "beginning the push",
        lambda engine: engine.begin_weight_update(text, push.id),
        push.clock,
        engines=_acknowledging(push),
    )


def acknowledge(push: Push, manifest: Manifest) -> None:
    """Fence every engine that does not hold just what was sent."""
    answers = push.roster.ask(
        "acknowledging the push",
        lambda engine: engine.acknowledge_weight_update(push.id),
        push.clock,
        engines=_acknowledging(push),
    )
    for index, reason in check_acknowledgements(answers, push.id, push.digests, manifest).items():
        push.roster.fence(index, reason)


def commit(push: Push, *, repacks: bool) -> None:
    """Call the new weights by their version, and see that it is so."""
    if repacks:
        _repack(push, restore_weights_before_load=False, post_process_quantization=True)
    push.roster.ask(
        "committing",
        lambda engine: engine.commit_weight_update(push.id, push.version),
        push.clock,
        engines=_acknowledging(push),
    )
    held = push.roster.ask("telling its version", lambda engine: engine.get_weight_version(), push.clock)
    for index, version in held.items():
        if str(version) != push.version:
            push.roster.fence(index, f"it holds version {version!r} after the push of version {push.version!r}")


def resume(push: Push) -> None:
    """Generate again."""
    push.roster.ask("continuing", lambda engine: engine.continue_generation(), push.clock)


def run_check(
    push: Push, loader: str, text: str | None = None, engines: Sequence[WeightReceiver] | None = None
) -> None:
    """Let engines run one of the weight checks; one that is gone is fenced.

    Args:
        push: under way.
        loader: the check, as ``load_format``.
        text: tensors for it; none by default.
        engines: those to ask; all by default.

    Raises:
        WeightSyncError: the check found something.
    """
    payload = text if text is not None else sglang.serialize_by_value([])
    for engine in push.roster.good if engines is None else engines:
        try:
            # A check names no version: nothing may be called by the new one before the commit.
            request = engine.update_weights_from_tensor(
                serialized_named_tensors=[payload] * engine.num_gpus,
                load_format=loader,
                weight_version=None,
                flush_cache=False,
            )
            request.wait(push.clock.step_s)
        except ProcessError as error:
            push.roster.fence(engine.index, f"{reason_of(error)} (in a check of its weights)")


def _acknowledging(push: Push) -> list[WeightReceiver]:
    return [engine for engine in push.roster.good if engine.acknowledges]


def _repack(push: Push, **what: bool) -> None:
    push.roster.ask("repacking weights", lambda engine: engine.post_process_weights(**what), push.clock)
