"""`mmrl watch`: its arguments, and the choice between page and terminal."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

from mmrl.errors import UserError

PORT = 8081


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "runs", metavar="RUN", type=Path, nargs="+", help="folders of runs or of comparisons (`mmrl compare`)"
    )
    port = f"port of the page on this machine; default: {PORT}; 0 picks a free one"
    parser.add_argument("--port", metavar="N", type=int, default=PORT, help=port)
    parser.add_argument("--text", action="store_true", help="show the runs in the terminal instead")
    parser.add_argument("--once", action="store_true", help="with --text: print once and exit")


def run(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Follow the runs until Ctrl-C."""
    from mmrl.cli.watch.folders import WatchedFolders

    if args.once and not args.text:
        raise UserError("--once requires --text")
    if not 0 <= args.port <= 65535:
        raise UserError(f"--port is {args.port}; must be from 0 to 65535")
    folders = WatchedFolders(args.runs)
    if args.text:
        from mmrl.cli.watch.folders import follow, lines

        if not args.once and sys.stdout.isatty():
            follow(folders)
        folders.refresh(seconds=math.inf)
        for line in lines(folders):
            say(line)
        return 0
    from mmrl.cli.watch.server import WatchServer

    try:
        server = WatchServer(folders, args.port)
    except OSError as error:
        raise UserError(f"port {args.port} cannot be used ({error.strerror}); choose another with --port") from error
    with server:
        say(f"watching at {server.address}; Ctrl-C stops this page; the runs continue")
        server.serve_forever()
    return 0
