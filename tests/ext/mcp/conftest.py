import sys
from pathlib import Path

from tests.unit.examples.conftest import ask, talk  # noqa: F401

# `make install` keeps the package out of the environment: every engine would import it, for a second.
sys.path.append(str(Path(sys.prefix) / "extras"))
