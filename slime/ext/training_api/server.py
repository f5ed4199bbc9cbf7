"""The service over HTTP, with the paths and bodies of the ``tinker`` package, 0.38.0.

Whoever has a key of ``--training-api-key-file`` sees what that key made; without a file, this machine alone may ask.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Middleware

from slime.ext.training_api.errors import Refused
from slime.ext.training_api.http_io import MAX_BODY_BYTES, OWNER, Handler, error_response
from slime.ext.training_api.routes import SessionRoutes, StateRoutes, WorkRoutes
from slime.ext.training_api.service import TrainingService
from slime.utils.http_door import own_names, refusal, with_address

OPEN = frozenset({"/api/v1/healthz"})
"""Paths for everybody."""
LOCAL = "local"
"""Owner of what clients without a key make."""


class Door:
    """Lets clients in, and answers for handlers that refuse.

    Args:
        keys: of the clients; without any, only this machine is let in.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._owners = {key: hashlib.sha256(key.encode()).hexdigest()[:16] for key in keys}
        self._own_names = own_names()

    def middleware(self) -> Middleware:
        """Return it as aiohttp takes it."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            at = with_address(self._own_names, request.get_extra_info("sockname"))
            refused = refusal(request.method, request.headers.items(), at, needs_json=False)
            if refused is not None:
                return error_response(refused.status, refused.reason)
            owner = self._owner(request.headers.get("X-API-Key", ""))
            if owner is None and request.path not in OPEN:
                return error_response(401, "X-API-Key is no key of this server (--training-api-key-file).")
            request[OWNER] = owner or LOCAL
            try:
                return await handler(request)
            except Refused as error:
                return error_response(error.status, str(error))
            except web.HTTPRequestEntityTooLarge:
                limit = f"{MAX_BODY_BYTES >> 20} MiB"
                return error_response(413, f"The body is larger than {limit}; send fewer data at a time.")
            except web.HTTPException as error:
                where = f"{request.method} {request.path[:200]}"
                return error_response(error.status, f"{where}: {error.reason}. It is not served.")

        return guard

    def _owner(self, key: str) -> str | None:
        if not self._owners:
            return LOCAL
        given = key.encode(errors="surrogateescape")
        # Every key is compared, so that time says nothing about which is near.
        found = [owner for known, owner in self._owners.items() if secrets.compare_digest(given, known.encode())]
        return found[0] if found else None


def application(service: TrainingService, keys: Sequence[str] = ()) -> web.Application:
    """Return the routes behind their door; the service begins and ends with the application.

    Args:
        service: does what is asked.
        keys: of the clients; without any, only this machine is let in.
    """

    async def start(app: web.Application) -> None:
        await service.start()

    async def stop(app: web.Application) -> None:
        await service.stop()

    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[Door(keys).middleware()])
    app.on_startup.append(start)
    app.on_shutdown.append(stop)
    for routes in (SessionRoutes(service), WorkRoutes(service), StateRoutes(service)):
        app.add_routes(routes.table())
    return app
