import sys
from pathlib import Path

from tests.unit.examples.conftest import ask, talk  # noqa: F401

# `make install` omits the package, because every engine would spend a second importing it.
sys.path.append(str(Path(sys.prefix) / "extras"))
