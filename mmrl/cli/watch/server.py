"""The page's server: on this machine alone, read-only, for whoever has the token of the address that was printed.

Three locks: the token, which another user of this machine does not know; the Host header, which a page of another site
that points its own name here cannot forge; and a policy by which the page loads and runs nothing but its own files, so
that nothing a model wrote is ever run.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shutil
import sys
import threading
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from mmrl.cli.watch.charts import charts, differences
from mmrl.cli.watch.folders import WatchedFolders
from mmrl.report.charts import COLOURS
from mmrl.runs.records import finite_or_none

HOST = "127.0.0.1"
PAGE = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/watch.css": ("watch.css", "text/css; charset=utf-8"),
    "/watch.js": ("watch.js", "text/javascript; charset=utf-8"),
    "/draw.js": ("draw.js", "text/javascript; charset=utf-8"),
}
MEDIA = {f".{suffix}": f"{kind}/{suffix}" for kind, suffix in (("image", "png"), ("video", "mp4"))}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
MOST_RUNS = 16
"""Runs that one request may overlay."""


class WatchServer(ThreadingHTTPServer):
    """Answers for some folders; `address` has the token."""

    daemon_threads = True

    def __init__(self, folders: WatchedFolders, port: int) -> None:
        self.folders = folders
        self.token = secrets.token_urlsafe(24)
        self.lock = threading.Lock()
        """Held while the folders are read or shown."""
        super().__init__((HOST, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that left before the answer is not an error."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @property
    def cookie(self) -> str:
        """Name of the cookie; browsers share cookies between the ports of a host."""
        return f"mmrl-watch-{self.server_port}"

    @property
    def address(self) -> str:
        """Where a browser opens the page."""
        return f"http://{HOST}:{self.server_port}/?token={self.token}"


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    server_version, sys_version = "mmrl", ""
    timeout = 30

    def do_GET(self) -> None:
        """Answer a request of the page."""
        address = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(address.query).items()}
        if self.headers.get("Host") not in [f"{host}:{self.server.server_port}" for host in (HOST, "localhost")]:
            self._refuse(403, "open the address that `mmrl watch` printed")
        elif address.path == "/" and "token" in query:
            self._enter(query["token"])
        elif not self._is_known(self._cookie()):
            self._refuse(403, "open the address that `mmrl watch` printed, with its token")
        else:
            self._answer(address.path, query)

    def _answer(self, path: str, query: dict[str, str]) -> None:
        if path in PAGE:
            name, kind = PAGE[path]
            self._send(Path(__file__).with_name(name).read_bytes(), kind)
        elif path == "/file":
            self._send_file(query)
        elif path in ANSWERS:
            with self.server.lock:
                content = ANSWERS[path](self.server.folders, query)
            if content is None:
                self._refuse(404, "no such run or step")
            else:
                text = json.dumps(finite_or_none(content), ensure_ascii=True, allow_nan=False)
                self._send(text.encode(), "application/json")
        else:
            self._refuse(404, "no such page")

    def _enter(self, token: str) -> None:
        """Trade the token of the address for a cookie, which keeps it out of the browser's history."""
        if not self._is_known(token):
            self._refuse(403, "open the address that `mmrl watch` printed, with its token")
            return
        cookie = f"{self.server.cookie}={token}; HttpOnly; SameSite=Strict; Path=/"
        self._head(303, {"Location": "/", "Set-Cookie": cookie, "Content-Length": "0"})

    def _is_known(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self.server.token.encode())

    def _cookie(self) -> str:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            return ""
        return found.value if found else ""

    def _send_file(self, query: dict[str, str]) -> None:
        run = self.server.folders.runs.get(query.get("run", ""))
        place = run.file(query.get("path", "")) if run else None
        if place is None:
            self._refuse(404, "no such file")
            return
        with place.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            self._head(200, {"Content-Type": MEDIA[place.suffix], "Content-Length": str(size)})
            shutil.copyfileobj(file, self.wfile)

    def _send(self, body: bytes, kind: str) -> None:
        tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
        if self.headers.get("If-None-Match") == tag:
            self._head(304, {"ETag": tag})
            return
        self._head(200, {"Content-Type": kind, "Content-Length": str(len(body)), "ETag": tag})
        self.wfile.write(body)

    def _refuse(self, status: int, reason: str) -> None:
        body = f"{reason}\n".encode()
        self._head(status, {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of requests."""


def _overview(folders: WatchedFolders, query: dict[str, str]) -> dict[str, Any]:
    folders.refresh()
    return {
        "runs": [run.status() for run in folders.runs.values()],
        "comparisons": folders.comparisons(),
        "behind": folders.behind,
        "colours": COLOURS,
    }


def _curves(folders: WatchedFolders, query: dict[str, str]) -> dict[str, Any] | None:
    names = query.get("runs", "").split(",")
    runs = [folders.runs[name] for name in names if name in folders.runs][:MOST_RUNS]
    drawn = charts(runs)
    shown = drawn if query.get("more") == "1" else [chart for chart in drawn if not chart.get("more")]
    return {"charts": shown, "differences": differences(runs)}


def _samples(folders: WatchedFolders, query: dict[str, str]) -> dict[str, Any] | None:
    run, step = folders.runs.get(query.get("run", "")), query.get("step", "")
    return run.samples(int(step)) if run and re.fullmatch(r"\d{1,12}", step) else None


ANSWERS = {"/runs.json": _overview, "/curves.json": _curves, "/samples.json": _samples}
