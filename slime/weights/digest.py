"""A 64-bit digest of bytes that is identical on every device and additive over pieces.

    digest = sum over the 64-bit words i of  mix(word_i, i)   (mod 2**64)

The sum makes evaluation order irrelevant, so a GPU kernel, a plain loop and several ranks that each hold a part get
the same value; the position inside ``mix`` detects swapped words.  ``mix(word, i)`` is the i-th
number of the generator splitmix64 seeded with the word (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014): a bijection of the word, and every input bit changes every output bit with a probability
near one half.  It guards against damage and mistakes, not against an adversary.

With 64-bit words a GPU spends about five integer instructions per byte and runs at memory bandwidth; with 32-bit words
the arithmetic was the bottleneck.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

WORD_BYTES = 8
MASK_64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
CHUNK_WORDS = 1 << 22
"""Words hashed at a time, which bounds scratch memory."""


def mix(word: int, position: int) -> int:
    """Return the contribution of one word, in plain Python: the definition against which fast paths are tested.

    Args:
        word: unsigned 64-bit word.
        position: its index in the segment.
    """
    value = (word + (position + 1) * GOLDEN) & MASK_64
    value = ((value ^ value >> 30) * MULTIPLIER_1) & MASK_64
    value = ((value ^ value >> 27) * MULTIPLIER_2) & MASK_64
    return value ^ value >> 31


def digest_bytes(data: Tensor) -> int:
    """Return the digest of one segment of bytes.

    Args:
        data: contiguous uint8 of shape ``[num_bytes]``; zero-padded to a multiple of 8 bytes for the digest.

    Returns:
        The unsigned digest; 0 for no bytes.
    """
    if data.dtype != torch.uint8 or data.dim() != 1:
        raise ValueError(f"digest_bytes takes a flat uint8 tensor; got {data.dtype} of shape {list(data.shape)}")
    num_whole = data.numel() // WORD_BYTES * WORD_BYTES
    total = 0
    if num_whole:
        whole = data[:num_whole]
        # Viewing bytes as words needs an aligned start, but a segment may start anywhere in its bucket.
        aligned = whole if whole.data_ptr() % WORD_BYTES == 0 else whole.clone()
        total += _sum_of_words(aligned.view(torch.int64))
    if num_whole < data.numel():
        tail = int.from_bytes(bytes(data[num_whole:].tolist()), "little")
        total += mix(tail, num_whole // WORD_BYTES)
    return total & MASK_64


def digest_tensor(tensor: Tensor) -> int:
    """Return the digest of a tensor's elements in row-major order, whatever its strides."""
    return digest_bytes(tensor.detach().contiguous().view(-1).view(torch.uint8))


def combine(digests: Iterable[int]) -> int:
    """Combine the digests of several segments into one that depends on their order."""
    return sum(mix(digest, position) for position, digest in enumerate(digests)) & MASK_64


def combine_wrapped(digests: Tensor) -> int:
    """Apply :func:`combine` to an int64 tensor of digests without a Python loop, for tens of thousands of digests."""
    return _sum_of_words(digests.cpu())


def as_signed(value: int) -> int:
    """Return the same 64 bits as a signed integer, as torch stores them."""
    return value - (1 << 64) if value >> 63 else value


def _xor_shifted(value: Tensor, bits: int) -> Tensor:
    """Return ``value ^ (value >> bits)`` with a logical (unsigned) shift."""
    return value ^ ((value >> bits) & ((1 << (64 - bits)) - 1))


def _sum_of_words(words: Tensor) -> int:
    """Return the sum of ``mix`` over int64 ``words``; torch's int64 arithmetic wraps modulo 2**64 as needed."""
    total = 0
    for start in range(0, words.numel(), CHUNK_WORDS):
        part = words[start : start + CHUNK_WORDS]
        positions = torch.arange(start + 1, start + 1 + part.numel(), dtype=torch.int64, device=words.device)
        value = part + positions * as_signed(GOLDEN)
        value = _xor_shifted(value, 30) * as_signed(MULTIPLIER_1)
        value = _xor_shifted(value, 27) * as_signed(MULTIPLIER_2)
        total += int(_xor_shifted(value, 31).sum())
    return total & MASK_64
