import sys
from pathlib import Path

# `make test` puts trackio and mlflow there, and `make install` nowhere: no run needs both.
sys.path.append(str(Path(sys.prefix) / "trackers"))
