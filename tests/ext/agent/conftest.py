import pytest

from tests.unit.examples.conftest import ask, talk  # noqa: F401
from tests.unit.talking_engine import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()
