"""Named spans add up; misuse is caught."""

import pytest

from slime.observability.timer import Timer, timer


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Timer().reset()


def test_spans_of_one_name_add_up_and_reset_forgets() -> None:
    Timer().add("a", 1.0)
    Timer().add("a", 0.5)
    Timer().add("b", 2.0)
    assert Timer().log_dict() == {"a": 1.5, "b": 2.0}
    Timer().reset("a")
    assert Timer().seconds("a") == 0.0
    assert Timer().seconds("b") == 2.0


def test_a_with_block_and_both_decorators_are_timed_even_when_they_raise() -> None:
    @timer
    def work() -> int:
        return 7

    @timer("named")
    def named() -> None:
        raise ValueError

    with timer("block"):
        assert work() == 7
    with pytest.raises(ValueError):
        named()
    assert set(Timer().log_dict()) == {"block", "work", "named"}
