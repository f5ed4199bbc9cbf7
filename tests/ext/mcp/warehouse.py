"""An MCP server made with the package itself: over standard input and output, or as an HTTP application."""

import asyncio
import os

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("warehouse", log_level="ERROR")
waiting: list[asyncio.Event] = []
given_up: list[str] = []


@server.tool()
def stock(article: str, function: str = "count") -> str:
    """Tell how many of an article there are.

    Args:
        article: its name.
        function: another name that a caller may use itself.
    """
    if article == "air":
        raise ToolError("nobody stores air")
    return f"{len(article)} {article} by {function}"


@server.tool()
async def meet(number: int) -> str:
    """Answer once three have come."""
    arrived = asyncio.Event()
    waiting.append(arrived)
    if len(waiting) == 3:
        for one in waiting:
            one.set()
    await arrived.wait()
    return f"{number} met in {os.getpid()}"


@server.tool()
async def doze(name: str) -> str:
    """Answer never."""
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        given_up.append(name)
        raise
    return "awake"


@server.tool()
def who_gave_up() -> list[str]:
    """Tell whose naps were given up."""
    return given_up


@server.tool()
def number() -> int:
    """Tell the process."""
    return os.getpid()


@server.tool()
def burn() -> str:
    """End the server in the middle of a call."""
    os._exit(3)


if __name__ == "__main__":
    server.run()
