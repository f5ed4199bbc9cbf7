"""The digest: its definition, sums over pieces, and changes that it must notice."""

from __future__ import annotations

import pytest
import torch

from slime.weights.digest import MASK_64, as_signed, combine, combine_wrapped, digest_bytes, mix


def plain_digest(data: bytes) -> int:
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    return sum(mix(word, i) for i, word in enumerate(words)) & MASK_64


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def test_mix_gives_the_numbers_of_splitmix64():
    # The first outputs of splitmix64 seeded with 0, as published with the generator.
    assert [mix(0, position) for position in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("length", [0, 1, 4, 7, 8, 9, 64, 1001])
def test_digest_equals_the_plain_sum(length):
    data = bytes((i * 37 + 11) % 256 for i in range(length))
    assert digest_bytes(as_tensor(data)) == plain_digest(data)


def test_every_single_bit_matters():
    data = bytearray(range(64))
    expected = digest_bytes(as_tensor(bytes(data)))
    for position in range(64 * 8):
        data[position // 8] ^= 1 << position % 8
        assert digest_bytes(as_tensor(bytes(data))) != expected
        data[position // 8] ^= 1 << position % 8


def test_digests_are_combined_alike_as_numbers_and_as_a_tensor():
    digests = [0, 1, MASK_64, 1 << 63, 0x0123456789ABCDEF]
    assert combine_wrapped(torch.tensor([as_signed(digest) for digest in digests])) == combine(digests)
