"""Tensors are shared out alike everywhere, and evenly."""

from __future__ import annotations

import random

from slime.ext.disk_push.disk import Shares


def test_every_tensor_has_one_owner_on_whom_all_agree():
    generator = random.Random(5)
    sizes = {f"t{index}": generator.randrange(0, 1000) for index in range(200)}
    members = [Shares(3, member) for member in range(3)]
    owners = {name: [member.is_own(name, size) for member in members] for name, size in sizes.items()}
    assert all(sum(claims) == 1 for claims in owners.values())
    loads = [sum(size for name, size in sizes.items() if owners[name][member]) for member in range(3)]
    assert max(loads) - min(loads) < 1000


def test_the_answer_does_not_change():
    shares = Shares(2, 0)
    first = [shares.is_own(name, 10) for name in "abc"]
    assert [shares.is_own(name, 99) for name in "abc"] == first == [True, False, True]
