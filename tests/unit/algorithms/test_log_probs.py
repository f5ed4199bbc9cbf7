"""Log-probabilities and entropy against torch's own softmax; gradients, masks, chunks, memory."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slime.algorithms.log_probs import KeptTokens, logits_of, vocab_parallel_log_probs


def plain(logits, targets, temperature=1.0, keep=None):
    scaled = logits / temperature
    entropy = torch.distributions.Categorical(logits=scaled).entropy()
    if keep is not None:
        keep = keep.scatter(1, targets[:, None], True)
        scaled = scaled.masked_fill(~keep, float("-inf"))
    return scaled.log_softmax(-1).gather(1, targets[:, None]).squeeze(1), entropy


def random_rows(rows=9, columns=13, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, columns, (rows,), generator=generator)
    keep = torch.rand(rows, columns, generator=generator) > 0.5
    return logits.to(dtype), targets, keep


@pytest.mark.parametrize("chunk_size", [-1, 1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("masked", [False, True])
def test_values_equal_those_of_a_plain_softmax(chunk_size, temperature, masked):
    logits, targets, keep = random_rows()
    keep = keep if masked else None
    log_prob, entropy = vocab_parallel_log_probs(
        logits, targets, chunk_size=chunk_size, with_entropy=True, keep=keep, temperature=temperature
    )
    expected = plain(logits, targets, temperature, keep)
    torch.testing.assert_close(log_prob, expected[0])
    torch.testing.assert_close(entropy, expected[1])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("chunk_size", [-1, 4])
def test_gradient_is_that_of_the_formula(masked, with_entropy, chunk_size):
    logits, targets, keep = random_rows(5, 7)
    logits.requires_grad_()

    def function(values):
        log_prob, entropy = vocab_parallel_log_probs(
            values,
            targets,
            chunk_size=chunk_size,
            with_entropy=with_entropy,
            keep=keep if masked else None,
            temperature=0.7,
        )
        return (log_prob, entropy) if with_entropy else log_prob

    assert torch.autograd.gradcheck(function, (logits,))


def test_entropy_as_a_metric_sends_no_gradient():
    logits, targets, _ = random_rows()
    logits.requires_grad_()
    log_prob, entropy = vocab_parallel_log_probs(logits, targets, with_entropy=True, entropy_grad=False)
    assert not entropy.requires_grad
    log_prob.sum().backward()
    reference = logits.detach().clone().requires_grad_()
    plain(reference, targets)[0].sum().backward()
    torch.testing.assert_close(logits.grad, reference.grad)


def test_bfloat16_logits_are_computed_in_float32_and_get_bfloat16_gradients():
    logits, targets, _ = random_rows(dtype=torch.bfloat16)
    logits.requires_grad_()
    log_prob, _ = vocab_parallel_log_probs(logits, targets, chunk_size=2)
    assert log_prob.dtype == torch.float32
    torch.testing.assert_close(log_prob.detach(), plain(logits.detach().float(), targets)[0])
    log_prob.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_huge_logits_neither_overflow_nor_lose_the_entropy():
    logits = torch.tensor([[1e4, 0.0, -1e4], [80.0, 80.0, -80.0]], requires_grad=True)
    log_prob, entropy = vocab_parallel_log_probs(logits, torch.tensor([0, 1]), with_entropy=True)
    torch.testing.assert_close(log_prob.detach(), torch.tensor([0.0, -math.log(2)]))
    torch.testing.assert_close(entropy.detach(), torch.tensor([0.0, math.log(2)]))
    (log_prob.sum() + entropy.sum()).backward()
    assert logits.grad.isfinite().all()


def test_columns_at_minus_infinity_do_not_exist():
    logits, targets, _ = random_rows(5, 7)
    padded = torch.cat([logits, torch.full((5, 2), float("-inf"), dtype=logits.dtype)], dim=1).requires_grad_()
    log_prob, entropy = vocab_parallel_log_probs(padded, targets, with_entropy=True, chunk_size=2)
    expected = plain(logits, targets)
    torch.testing.assert_close(log_prob, expected[0])
    torch.testing.assert_close(entropy, expected[1])
    (log_prob.sum() + entropy.sum()).backward()
    assert padded.grad.isfinite().all()
    assert torch.equal(padded.grad[:, 7:], torch.zeros(5, 2, dtype=logits.dtype))


def test_target_is_kept_even_when_the_mask_drops_everything():
    log_prob, _ = vocab_parallel_log_probs(
        torch.randn(2, 5), torch.tensor([1, 3]), keep=torch.zeros(2, 5, dtype=torch.bool)
    )
    torch.testing.assert_close(log_prob, torch.zeros(2))


class LargeFloat32(TorchDispatchMode):
    """Tracks float32 storages of at least ``floor`` elements, and the most elements alive at once."""

    def __init__(self, floor, known):
        super().__init__()
        self.floor, self.alive, self.peak = floor, {}, 0
        self.known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        import weakref

        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self.known or storage.nbytes() // 4 < self.floor or key in self.alive:
                continue
            self.alive[key] = storage.nbytes() // 4
            weakref.finalize(storage, self.alive.pop, key, None)
            self.peak = max(self.peak, sum(self.alive.values()))
        return result


@pytest.mark.parametrize("with_entropy", [False, True])
def test_never_more_than_one_float32_chunk_lives(with_entropy):
    rows, columns, chunk = 64, 512, 8
    logits = torch.randn(rows, columns, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, columns, (rows,))
    with LargeFloat32(columns, []) as meter:
        log_prob, entropy = vocab_parallel_log_probs(logits, targets, chunk_size=chunk, with_entropy=with_entropy)
        loss = log_prob.sum() + (entropy.sum() if with_entropy else 0.0)
    forward_peak = meter.peak
    with LargeFloat32(columns, []) as meter:
        loss.backward()
    assert 0 < forward_peak <= chunk * columns
    assert 0 < meter.peak <= chunk * columns


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_some_rows_without_padding_columns_equal_the_same_rows_cut_out(with_entropy, overwrite):
    logits, _, _ = random_rows(9, 13)
    rows = torch.tensor([7, 0, 3, 4])
    targets = torch.tensor([1, 10, 0, 5])
    leaf = logits.clone().requires_grad_()
    log_prob, entropy = vocab_parallel_log_probs(
        leaf * 1.0,
        targets,
        rows_R=rows,
        vocab_size=11,
        chunk_size=3,
        with_entropy=with_entropy,
        overwrite_logits=overwrite,
    )
    twin = logits.clone().requires_grad_()
    expected = plain(twin[rows, :11], targets)
    torch.testing.assert_close(log_prob, expected[0])
    weights = torch.randn(2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loss, wanted = (log_prob * weights[0]).sum(), (expected[0] * weights[0]).sum()
    if with_entropy:
        torch.testing.assert_close(entropy, expected[1])
        loss, wanted = loss + (entropy * weights[1]).sum(), wanted + (expected[1] * weights[1]).sum()
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(leaf.grad, twin.grad)


def test_the_gradient_takes_the_place_of_the_logits_on_request():
    logits, targets, _ = random_rows(dtype=torch.float32)
    leaf = logits.clone().requires_grad_()
    produced = leaf * 1.0
    vocab_parallel_log_probs(produced, targets, overwrite_logits=True)[0].sum().backward()
    assert torch.equal(produced.detach(), leaf.grad)

    leaf = logits.clone().requires_grad_()
    vocab_parallel_log_probs(leaf.view(9, 13), targets, overwrite_logits=True)[0].sum().backward()
    assert torch.equal(leaf.detach(), logits), "a parameter is never overwritten"


def test_another_reader_of_overwritten_logits_in_the_backward_pass_is_told():
    logits, targets, _ = random_rows(dtype=torch.float32)
    produced = logits.requires_grad_() * 1.0
    other = produced.exp().log().square().sum() + produced.square().sum()  # both keep the logits for their backward
    loss = other + vocab_parallel_log_probs(produced, targets, overwrite_logits=True)[0].sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("chunk_size", [-1, 2])
def test_pairs_of_kept_tokens_are_the_mask_that_they_describe(chunk_size):
    logits, targets, keep = random_rows(9, 13)
    keep[4] = False  # recorded, but entirely in other shards
    is_recorded = torch.tensor([True, True, False, True, True, True, False, True, True])
    pairs = keep.logical_and(is_recorded[:, None]).nonzero(as_tuple=True)
    mask = keep | ~is_recorded[:, None]
    found = vocab_parallel_log_probs(logits, targets, keep=KeptTokens(*pairs, is_recorded), chunk_size=chunk_size)
    torch.testing.assert_close(found[0], plain(logits, targets, keep=mask)[0])


def test_logits_of_chosen_tokens_carry_their_gradient():
    logits = torch.randn(3, 4, requires_grad=True)
    chosen = logits_of(logits, torch.tensor([2, 0]), torch.tensor([[1, 3], [0, 0]]))
    torch.testing.assert_close(chosen, torch.stack([logits[2, [1, 3]], logits[0, [0, 0]]]))
    chosen.sum().backward()
    assert logits.grad.tolist() == [[2.0, 0, 0, 0], [0, 0, 0, 0], [0, 1.0, 0, 1.0]]
