"""Weight pushes over a shared disk: full versions, deltas, local copies on engine hosts, and ``--release-train``."""
