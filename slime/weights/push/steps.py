"""What rank 0 asks of the engines in every push; one that gives no answer is excluded from it."""

from __future__ import annotations

from collections.abc import Sequence

from slime.utils.errors import DeadlineError, EngineDiedError, ProcessError, WeightSyncError
from slime.weights.push.engine import EngineProxy
from slime.weights.push.participants import reason_of
from slime.weights.push.state import Push


def pause(push: Push) -> None:
    """Stop generating and forget the prefix cache.  Excluded engines are paused too: they must not serve."""
    engines = push.participants
    engines.ask("pausing", lambda engine: engine.pause_generation(), engines.engines.values())
    engines.ask("flushing its cache", lambda engine: engine.flush_cache())


def require_repacking(push: Push, engines: Sequence[EngineProxy]) -> None:
    """See that engines can undo and redo their repacking of weights, before anything is paused.

    Raises:
        WeightSyncError: an engine cannot.
    """
    for engine in engines:
        try:
            # Neither undo nor redo: an engine that has the endpoint does nothing.
            engine.post_process_weights().wait(push.participants.clock.step_s)
        except (EngineDiedError, DeadlineError) as error:
            push.participants.exclude(engine.index, f"{reason_of(error)} (while asking for a push's needs)")
        except ProcessError as error:
            raise WeightSyncError(
                f"--hf-checkpoint holds compressed-tensors weights, which engines repack when they load them; engine "
                f"{engine.index} cannot undo that for a push ({error}). Start it with slime's --custom-weight-loader, "
                "which can, or use an SGLang with /post_process_weights or a checkpoint in FP8 by blocks "
                "(tools/convert_hf_to_fp8.py)"
            ) from error


def undo_repacking(push: Push, engines: Sequence[EngineProxy]) -> None:
    """Have engines hold their weights as a checkpoint has them."""
    undo = "undoing its repacking of weights"
    push.participants.ask(undo, lambda engine: engine.post_process_weights(restore_weights_before_load=True), engines)


def repack(push: Push, engines: Sequence[EngineProxy]) -> None:
    """Have engines hold their weights as kernels read them."""
    redo = "repacking weights"
    push.participants.ask(redo, lambda engine: engine.post_process_weights(post_process_quantization=True), engines)


def require_version(push: Push) -> None:
    """Exclude engines that do not tell the version of the push as theirs."""
    held = push.participants.ask("telling its version", lambda engine: engine.get_weight_version())
    for index, version in held.items():
        if str(version) != push.version:
            push.participants.exclude(
                index, f"it holds version {version!r} after the push of version {push.version!r}"
            )


def continue_generation(push: Push) -> None:
    """Generate again."""
    push.participants.ask("continuing", lambda engine: engine.continue_generation())
