"""One layout's checkpoint loads in another bit for bit; mismatches are named; a save can run in the background.

One world of two processes runs everything, with new parallel groups for each layout.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.matrix.pool import run_ranks

pytestmark = pytest.mark.dist

LAYOUTS = {
    "EP2": "--expert-model-parallel-size 2",
    "TP2, experts TP2": "--tensor-model-parallel-size 2",
    "TP2, experts EP2": (
        "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --expert-model-parallel-size 2"
    ),
    "PP2, 3 and 1 layers": "--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1",
    "PP2, two chunks each": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "DP2, overlapped buckets": "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000",
}


def save_and_load(saved_under: str, precision: str, loaded_under: list[str], folder: str) -> dict[str, list[str]]:
    """Save after two steps, load under each layout, save again; return the names of tensors that differ."""
    import torch.distributed as dist

    from slime.backends.megatron_utils.checkpoint import load_checkpoint, publish_checkpoint, save_checkpoint
    from tests.dist.checkpoint_case import build, parse, take_step, tensors_in

    first, again = Path(folder) / "first", Path(folder) / "again"
    args = parse(*saved_under.split(), precision, folder=str(first))
    model, optimizer, scheduler = build(args)
    for index in range(2):
        take_step(model, optimizer, scheduler, index)
    saved_in = save_checkpoint(args, 7, model, optimizer, scheduler)
    if dist.get_rank() == 0:
        publish_checkpoint(args.save, 7)
    dist.barrier()
    expected = tensors_in(saved_in)
    differing = {}
    for layout in loaded_under:
        args = parse(*LAYOUTS[layout].split(), precision, folder=str(first))
        model, optimizer, scheduler = build(args)
        assert load_checkpoint(args, model, optimizer, scheduler) == 7
        args.save = str(again)
        actual = tensors_in(save_checkpoint(args, 7, model, optimizer, scheduler))
        assert actual.keys() == expected.keys()
        differing[layout] = [name for name, tensor in expected.items() if not actual[name].equal(tensor)]
        dist.barrier()
    names = list(expected)
    assert any(name.startswith("optimizer.state.exp_avg_sq.mtp.layers.0") for name in names)
    assert any("optimizer.state.param.decoder.layers.1.mlp.experts.experts.linear_fc1" in name for name in names)
    assert not any(name.startswith("optimizer.") and "q_layernorm" in name for name in names)  # frozen
    assert all(tensor.abs().max() > 0 for name, tensor in expected.items() if "exp_avg" in name)
    return differing


@pytest.mark.parametrize(
    ("saved_under", "precision", "loaded_under"),
    [
        ("", "--fp32", list(LAYOUTS)),
        (LAYOUTS["PP2, two chunks each"], "--bf16", ["EP2", "DP2, overlapped buckets", "TP2, experts EP2"]),
    ],
    ids=["fp32", "bf16"],
)
def test_weights_and_optimizer_are_the_same_under_another_layout(tmp_path, saved_under, precision, loaded_under):
    for differing in run_ranks(save_and_load, 2, saved_under, precision, loaded_under, str(tmp_path)):
        assert differing == {layout: [] for layout in loaded_under}


MISFITS = {
    "--num-layers 5 --moe-layer-freq [0,1,1,1,1]": ("--num-layers is 5; the checkpoint has 4", "decoder.layers.4."),
    "--hidden-size 64": ("--hidden-size is 64; the checkpoint has 48", "is [48] in the checkpoint and [64]"),
    "--num-attention-heads 12 --kv-channels 8 --num-query-groups 4": (
        "--num-attention-heads is 12; the checkpoint has 6",
        "--kv-channels is 8; the checkpoint has 16",
    ),
    "--vocab-size 160": ("--vocab-size is 160; the checkpoint has 131", "output_layer.weight"),
    "--num-experts 8": ("--num-experts is 8; the checkpoint has 4", "experts.linear_fc1.weight is [4, 48, 48]"),
    "--add-qkv-bias": ("self_attention.linear_qkv.bias is not in the checkpoint", "(5 tensors are missing in all)"),
}


def refusals(folder: str) -> dict[str, str]:
    """The error of loading a checkpoint with each set of wrong flags."""
    from slime.backends.megatron_utils.checkpoint import load_checkpoint, publish_checkpoint, save_checkpoint
    from slime.utils.errors import DataError
    from tests.dist.checkpoint_case import build, parse

    args = parse("--fp32", "--make-vocab-size-divisible-by", "1", folder=folder)
    model, optimizer, scheduler = build(args)
    save_checkpoint(args, 3, model, None, None)
    publish_checkpoint(folder, 3)
    messages = {}
    for flags in MISFITS:
        args = parse("--fp32", "--make-vocab-size-divisible-by", "1", *flags.split(), folder=folder)
        model, optimizer, scheduler = build(args)
        with pytest.raises(DataError) as caught:
            load_checkpoint(args, model, optimizer, scheduler)
        messages[flags] = str(caught.value)
    args = parse("--fp32", folder=folder)
    model, optimizer, scheduler = build(args)
    with pytest.raises(DataError) as caught:
        load_checkpoint(args, model, optimizer, scheduler)
    messages["optimizer"] = str(caught.value)
    args.no_load_optim = True
    assert load_checkpoint(args, model, optimizer, scheduler) == 3
    # A folder named directly; a release has no iteration.
    release = Path(folder) / "iter_0000003"
    args.load = str(release.rename(release.with_name("release")))
    assert load_checkpoint(args, model, optimizer, scheduler) == 0
    # A model without the MTP layer leaves its tensors unread.
    args = parse("--fp32", "--mtp-num-layers", "0", folder=args.load)
    args.enable_mtp_training = False
    model, optimizer, scheduler = build(args)
    assert load_checkpoint(args, model, optimizer, scheduler) == 0
    return messages


def test_a_checkpoint_that_does_not_fit_is_refused_with_what_differs(tmp_path):
    (messages,) = run_ranks(refusals, 1, str(tmp_path))
    assert "no optimizer state" in messages.pop("optimizer")
    for flags, message in messages.items():
        for part in MISFITS[flags]:
            assert part in message, message


def save_behind_training(folder: str) -> None:
    """Background saves: what they hold, when they count, and what happens to a failed one."""
    import torch.distributed as dist

    from slime.backends.megatron_utils import checkpoint
    from slime.backends.megatron_utils.checkpoints import checkpoint_writer
    from slime.backends.megatron_utils.checkpoints.checkpoint_writer import BackgroundSave
    from slime.flags.checkpoint import TRACKER, inspect_checkpoint, read_tracker
    from slime.utils.errors import ConfigError, DataError
    from tests.dist.checkpoint_case import build, parse, take_step, tensors_in

    args = parse("--fp32", folder=folder)
    model, optimizer, scheduler = build(args)
    background = BackgroundSave(checkpoint.publish_checkpoint)
    state: tuple[Any, Any, Any] = (model, optimizer, scheduler)
    plain = tensors_in(checkpoint.save_checkpoint(args, 1, *state))
    background.publish(folder, 1)  # nothing is being written, so it is immediate
    dist.barrier()
    assert read_tracker(Path(folder) / TRACKER, "--save") == 1

    gate, write = threading.Event(), checkpoint_writer._write

    def late(*arguments: Any) -> None:
        gate.wait()
        write(*arguments)

    checkpoint_writer._write = late
    lagging = checkpoint.save_checkpoint(args, 2, *state, background=background)
    background.publish(folder, 2)
    take_step(*state, seed=0)  # training continues
    assert read_tracker(Path(folder) / TRACKER, "--save") == 1
    with pytest.raises(ConfigError, match="no checkpoint iter_0000002, or it is incomplete"):
        inspect_checkpoint(folder, "--load", 2)
    gate.set()
    background.wait()
    dist.barrier()
    assert read_tracker(Path(folder) / TRACKER, "--save") == 2
    written = tensors_in(lagging)
    assert written.keys() == plain.keys()
    assert all(written[name].equal(tensor) for name, tensor in plain.items())
    checkpoint_writer._write = write

    # Published after it was written; then one whose second rank cannot write.
    checkpoint.save_checkpoint(args, 3, *state, background=background)
    background.wait()
    dist.barrier()
    assert read_tracker(Path(folder) / TRACKER, "--save") == 2
    dist.barrier()  # rank 1 has checked, too
    background.publish(folder, 3)
    dist.barrier()
    assert read_tracker(Path(folder) / TRACKER, "--save") == 3

    def fail(*arguments: Any) -> Any:
        raise OSError("no space left")

    write_data = checkpoint_writer._FileWriter.write_data
    if dist.get_rank() == 1:
        checkpoint_writer._FileWriter.write_data = fail
    checkpoint.save_checkpoint(args, 4, *state, background=background)
    background.publish(folder, 4)
    with pytest.raises(DataError, match="no space left"):
        background.wait()
    checkpoint_writer._FileWriter.write_data = write_data
    dist.barrier()
    assert read_tracker(Path(folder) / TRACKER, "--save") == 3
    # The next save of that iteration removes the remains, without waiting for anything.
    checkpoint.save_checkpoint(args, 4, *state, background=background)
    background.publish(folder, 4)
    background.wait()
    dist.barrier()
    assert read_tracker(Path(folder) / TRACKER, "--save") == 4
    args.ckpt_step = 2
    assert checkpoint.load_checkpoint(args, *build(args)) == 2


def test_a_background_save_holds_the_moment_it_was_asked_for_and_counts_when_all_is_on_disk(tmp_path):
    run_ranks(save_behind_training, 2, str(tmp_path))


def save_copies(folder: str) -> None:
    """Save as from a device, whose tensors are copied to the host."""
    from slime.backends.megatron_utils.checkpoint import save_checkpoint
    from slime.backends.megatron_utils.checkpoints.checkpoint_writer import WRITER_THREADS, HostPlanner
    from tests.dist.checkpoint_case import build, parse, tensors_in

    args = parse("--fp32", folder=folder)
    state: tuple[Any, Any, Any] = build(args)
    plain = tensors_in(save_checkpoint(args, 1, *state))
    copies: list[Any] = []

    def copy(planner: HostPlanner, value: Any) -> Any:
        copies.append(value.detach().clone())
        return copies[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostPlanner, "on_host", copy)
        written = tensors_in(save_checkpoint(args, 2, *state))
    assert written.keys() == plain.keys()
    assert all(written[name].equal(tensor) for name, tensor in plain.items())
    in_memory = [tensor for tensor in copies if tensor.untyped_storage().nbytes()]
    assert len(in_memory) <= WRITER_THREADS < len(copies) // 2, (len(in_memory), len(copies))


def test_a_save_from_a_device_holds_one_tensor_a_thread_on_the_host(tmp_path):
    run_ranks(save_copies, 1, str(tmp_path))
