"""A resumed run continues as if it had never stopped, also under another layout.

Each world has new processes: save after two optimizer steps, and take two more; then load and take the same two.
"""

from argparse import Namespace

import pytest

from slime.utils.errors import DataError
from tests.matrix.pool import run_ranks

pytestmark = pytest.mark.dist

SEQUENCES = ([5, 9, 2, 77, 31], [8, 8, 1], [100, 4, 60, 3, 2, 9, 17], [1, 2], [44, 45, 46, 47], [7, 7, 9, 12])
MODEL_FLAGS = (
    "--num-layers 3 --hidden-size 48 --ffn-hidden-size 80 --num-attention-heads 6 --group-query-attention "
    "--num-query-groups 2 --kv-channels 16 --vocab-size 144 --make-vocab-size-divisible-by 8 --rotary-base 10000 "
    "--norm-epsilon 1e-6 --swiglu --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm "
    "--qk-layernorm --untie-embeddings-and-output-weights --lr 1e-2 --lr-decay-style cosine --lr-warmup-iters 1 "
    "--weight-decay 0.1 --clip-grad 1.0 --attention-dropout 0 --hidden-dropout 0"
).split()


def build(layout: list[str], precision: str, save: str) -> tuple[Namespace, list, object, object]:
    """Model, optimizer and scheduler of the tiny test model under ``layout``."""
    from slime.backends.megatron_utils.arguments import validate_megatron_arguments
    from slime.backends.megatron_utils.initialize import init
    from slime.backends.megatron_utils.model import build_model, build_optimizer, build_scheduler
    from slime.compose import flag_groups, parts
    from slime.flags.cluster import derive_for_extensions
    from slime.flags.group import complete_all
    from slime.flags.parse import build_parser
    from slime.ray.parts import load_all

    parser = build_parser(with_engine_flags=False, groups=flag_groups())
    sizes = "--global-batch-size 6 --num-rollout 8 --rollout-batch-size 6 --n-samples-per-prompt 1".split()
    args = parser.parse_args([*MODEL_FLAGS, *layout, *sizes, precision, "--save", save, "--load", save])
    import torch.distributed as dist

    args.actor_num_gpus_per_node = dist.get_world_size()
    derive_for_extensions(args)
    validate_megatron_arguments(args)
    complete_all(args, flag_groups())
    init(args)
    model = build_model(args, transforms=load_all(parts(args).transforms))
    optimizer = build_optimizer(args, model)
    return args, model, optimizer, build_scheduler(args, optimizer)


def step(model: list, optimizer: object, scheduler: object, index: int) -> tuple[float, float]:
    """One optimizer step on all sequences, split over the data-parallel ranks; return (loss sum, grad norm)."""
    import torch
    import torch.distributed as dist
    from megatron.core import mpu
    from megatron.core.distributed import finalize_model_grads

    from tests.unit.backends.megatron_utils.megatron_case import pack

    (chunk,) = model
    chunk.zero_grad_buffer()
    optimizer.zero_grad()
    mine = SEQUENCES[mpu.get_data_parallel_rank() :: mpu.get_data_parallel_world_size()]
    sequences = [torch.tensor([(token + index) % 131 for token in sequence]) for sequence in mine]
    tokens, params = pack(sequences)
    labels, _ = pack([torch.roll(sequence, -1) for sequence in sequences])
    pad = (-tokens.shape[1]) % mpu.get_tensor_model_parallel_world_size()
    if pad:  # sequence parallelism needs a multiple of the tensor-parallel size: one more pseudo-sequence
        tokens, params = pack([*sequences, torch.zeros(pad, dtype=torch.long)])
        labels, _ = pack([*[torch.roll(sequence, -1) for sequence in sequences], torch.zeros(pad, dtype=torch.long)])
    losses = chunk(
        input_ids=tokens, position_ids=None, attention_mask=None, labels=labels, packed_seq_params=params
    ).float()
    total = losses[0, : losses.shape[1] - pad].sum()
    # DDP averages over data-parallel ranks: undo that, so that the gradient belongs to the whole sum.
    (total * mpu.get_data_parallel_world_size()).backward()
    finalize_model_grads([chunk])
    ok, grad_norm, _ = optimizer.step()
    assert ok
    scheduler.step(increment=6)
    summed = total.detach().double().clone()
    dist.all_reduce(summed, group=mpu.get_data_parallel_group())
    return float(summed), float(grad_norm)


def train_and_save(layout: list[str], precision: str, save: str) -> list[tuple[float, float]]:
    """Steps 0 and 1, a save, and the results of steps 2 and 3."""
    from slime.backends.megatron_utils.checkpoint import publish_checkpoint, save_checkpoint

    args, model, optimizer, scheduler = build(layout, precision, save)
    for index in range(2):
        step(model, optimizer, scheduler, index)
    save_checkpoint(args, 1, model, optimizer, scheduler)
    import torch.distributed as dist

    if dist.get_rank() == 0:
        publish_checkpoint(save, 1)
    return [step(model, optimizer, scheduler, index) for index in (2, 3)]


def load_and_train(layout: list[str], precision: str, save: str) -> list[tuple[float, float]]:
    """The results of steps 2 and 3 of a run that resumes."""
    from slime.backends.megatron_utils.checkpoint import load_checkpoint

    args, model, optimizer, scheduler = build(layout, precision, save)
    assert load_checkpoint(args, model, optimizer, scheduler) == 1
    return [step(model, optimizer, scheduler, index) for index in (2, 3)]


@pytest.fixture(scope="module")
def saved_by_one_process(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("one"))
    (figures,) = run_ranks(train_and_save, 1, [], "--fp32", folder)
    return folder, figures


TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]


def test_the_same_layout_resumes_bit_for_bit(saved_by_one_process):
    folder, expected = saved_by_one_process
    (resumed,) = run_ranks(load_and_train, 1, [], "--fp32", folder)
    assert resumed == expected


@pytest.mark.parametrize("layout", [[], TP2], ids=["one to DP2", "one to TP2"])
def test_a_resume_under_another_layout_differs_by_rounding_only(saved_by_one_process, layout):
    folder, expected = saved_by_one_process
    resumed = run_ranks(load_and_train, 2, layout, "--fp32", folder)[0]
    for (loss, norm), (expected_loss, expected_norm) in zip(resumed, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-5)


@pytest.mark.parametrize("layout", [[], TP2], ids=["one", "TP2"])
def test_a_run_with_a_frozen_layer_resumes_bit_for_bit_and_with_the_layer_trained(tmp_path, layout):
    """On disk, a parameter of all layers is one tensor, of which the optimizer then holds a part."""
    frozen, num_ranks = [*layout, "--freeze-params-name-list", r"layers\.0\."], 2 if layout else 1
    expected = run_ranks(train_and_save, num_ranks, frozen, "--fp32", str(tmp_path))
    assert run_ranks(load_and_train, num_ranks, frozen, "--fp32", str(tmp_path)) == expected
    ((loss, norm), _) = run_ranks(load_and_train, 1, [], "--fp32", str(tmp_path))[0]
    (expected_loss, expected_norm) = expected[0][0]
    assert loss == pytest.approx(expected_loss, rel=1e-5) and norm > expected_norm


def test_bf16_with_fp32_masters_and_several_overlapped_buckets_resumes_bit_for_bit(tmp_path):
    layout = ["--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "20000"]
    expected = run_ranks(train_and_save, 2, layout, "--bf16", str(tmp_path))
    assert run_ranks(load_and_train, 2, layout, "--bf16", str(tmp_path)) == expected


def test_with_the_schedule_of_the_checkpoint_no_flag_of_it_counts_from_the_first_step_on(tmp_path):
    schedule = "--lr-decay-style WSD --lr-wsd-decay-iters 5 --lr-wsd-decay-style linear --lr-warmup-init 1e-3"
    decay = "--weight-decay-incr-style linear --start-weight-decay 0.3 --end-weight-decay 0.9"
    (expected,) = run_ranks(train_and_save, 1, f"{schedule} {decay}".split(), "--fp32", str(tmp_path))
    others = "--use-checkpoint-opt_param-scheduler --lr 1e-4 --weight-decay 0.05".split()
    assert run_ranks(load_and_train, 1, others, "--fp32", str(tmp_path)) == [expected]


def load_into_wider_model(save: str) -> str:
    from slime.backends.megatron_utils.checkpoint import load_checkpoint

    args, model, optimizer, scheduler = build(["--ffn-hidden-size", "96"], "--fp32", save)
    try:
        load_checkpoint(args, model, optimizer, scheduler)
    except DataError as error:
        return str(error)
    return ""


def test_a_checkpoint_of_another_shape_is_refused_by_name(saved_by_one_process):
    folder, _ = saved_by_one_process
    (message,) = run_ranks(load_into_wider_model, 1, folder)
    assert "does not fit the model" in message and "linear_fc" in message
