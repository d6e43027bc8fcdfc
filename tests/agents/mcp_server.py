"""A server for the tests of `mmrl.agents.environments.mcp_tools`: python mcp_server.py [PORT]."""

import io
import os
import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from PIL import Image as Pixels

server = MCPServer("counter")
counts = [0]


@server.tool()
def add(by: int = 1) -> int:
    """Add to the count."""
    counts[0] += by
    return counts[0]


@server.tool()
def fail(text: str) -> str:
    raise ValueError(text)


@server.tool()
def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


@server.tool()
def picture() -> Image:
    content = io.BytesIO()
    Pixels.new("RGB", (3, 2), (255, 0, 0)).save(content, "PNG")
    return Image(data=content.getvalue(), format="png")


@server.tool()
def processes() -> str:
    """The ids of this process and its parent."""
    return f"{os.getpid()} {os.getppid()}"


@server.tool()
def stop() -> str:
    os.kill(os.getpid(), 19)
    return "stopped"


if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
