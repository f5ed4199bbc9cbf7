"""What the service answers instead of a result."""

from __future__ import annotations

from slime.utils.errors import DataError, ProcessError


class Refused(DataError):
    """A request that is not accepted, as its answer says.

    Args:
        status: of HTTP.  The client tries again after 408, 409, 429 and 5xx, and hands all others to its user.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Failed(ProcessError):
    """An accepted request that ended without a result; its future says why.

    Args:
        by_user: the client asked for what cannot be done, and is to change it.
    """

    def __init__(self, message: str, *, by_user: bool = False) -> None:
        super().__init__(message)
        self.by_user = by_user
