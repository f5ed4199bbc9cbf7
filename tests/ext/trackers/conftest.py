import sys
from pathlib import Path

import pytest

PACKAGES = Path(sys.prefix) / "trackers"
"""`make test` puts trackio and mlflow there, and `make install` nowhere: no run needs both."""
sys.path.append(str(PACKAGES))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drop warnings of these packages: the parent process of pytest-xdist cannot import their classes, and ends."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
