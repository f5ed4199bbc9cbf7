"""The router's process: ``python -m slime.backends.sglang_utils.router_main OWNER_PID`` with RouterArgs on stdin."""

from __future__ import annotations

from slime.backends.sglang_utils.child_process import owner_pid, read_settings
from slime.backends.sglang_utils.owner_watch import end_with_owner


def main() -> None:
    """Route until killed."""
    end_with_owner(owner_pid())
    settings = read_settings()
    from sglang_router.launch_router import launch_router
    from sglang_router.router_args import RouterArgs

    launch_router(RouterArgs(**settings))


if __name__ == "__main__":
    main()
