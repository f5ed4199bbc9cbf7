import pytest

from tests.unit.agent.talking_engine import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()
