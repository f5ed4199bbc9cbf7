from tests.unit.examples.conftest import ask, talk  # noqa: F401
