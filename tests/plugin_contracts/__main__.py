"""The old name of ``slime check``: ``python -m tests.plugin_contracts --hook custom-rm --path my.module.reward``."""

import sys

from tools.check import main

sys.exit(main())
