"""The service over HTTP, with the paths and bodies of the ``tinker`` package, 0.38.0.

Whoever has a key of ``--training-api-key-file`` sees what that key made; without a file, this machine alone may ask.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from slime.ext.training_api.door import Door
from slime.ext.training_api.http_io import MAX_BODY_BYTES
from slime.ext.training_api.service import TrainingService
from slime.ext.training_api.session_routes import SessionRoutes
from slime.ext.training_api.state_routes import StateRoutes
from slime.ext.training_api.work_routes import WorkRoutes


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
