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
from collections.abc import Mapping, Sequence
from functools import partial
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

from mmrl.cli.watch.folders import WatchedFolders
from mmrl.cli.watch.runs import WatchedRun, short
from mmrl.files import open_file
from mmrl.report.charts import COLOURS
from mmrl.report.curves import CHARTS, LOGARITHMIC, UNCHARTED, UNITS, by_kind, chart_title, subjects
from mmrl.runs.metrics import label, measured
from mmrl.runs.records import finite_or_none
from mmrl.runs.statistics import HEADLINES, SHARES
from mmrl.runs.tracking import describe_metric, metric_definitions

POINTS = 300
MOST_PROTOCOLS = 3
"""Maximum number of evaluation metrics per split that are drawn."""


def charts(runs: Sequence[WatchedRun], points: int = POINTS) -> list[dict[str, Any]]:
    """All charts with unit and series, without the metrics that are zero in all runs."""
    drawn = _evaluation_charts(runs)
    names = list(dict.fromkeys(name for run in runs for name in run.metrics.names() if name != "time"))
    names = [name for name in names if not name.startswith((*UNCHARTED, "warnings/"))]
    recipes = {str(run.settings().get("recipe", "")) for run in runs}
    recipe = recipes.pop() if len(recipes) == 1 else ""
    for title, chosen in subjects(names):
        found = _metric_charts(title, chosen, runs, points, recipe)
        drawn += found if title in CHARTS else [{**chart, "more": True} for chart in found]
    return drawn


def differences(runs: Sequence[WatchedRun]) -> list[dict[str, Any]]:
    """Options that differ between the runs, with the value of each run."""
    settings = [run.settings() for run in runs]
    options = dict.fromkeys(name for found in settings for name in found)
    return [
        {"option": option, "values": values}
        for option in options
        if option != "output_dir" and len(set(values := [found.get(option, "–") for found in settings])) > 1
    ]


def _evaluation_charts(runs: Sequence[WatchedRun]) -> list[dict[str, Any]]:
    """One chart per split for a single run; one chart per split and metric for several runs."""
    found = []
    for split in dict.fromkeys(str(row.get("split", "")) for run in runs for row in run.evaluations):
        rows = {run.name: [row for row in run.evaluations if row.get("split", "") == split] for run in runs}
        names = measured([row for own in rows.values() for row in own], HEADLINES)[:MOST_PROTOCOLS]
        for chosen in [names] if len(runs) == 1 and names else [[name] for name in names]:
            series = [
                {"run": run, "label": label(name), **_estimates(own, name)}
                for run, own in rows.items()
                for name in chosen
                if any(name in row for row in own)
            ]
            family, protocol = (
                chosen[0].partition("/")[0].capitalize(),
                f", {label(chosen[0])}" if len(runs) > 1 else "",
            )
            unit = "%" if all(name.startswith(SHARES) for name in chosen) else ""
            found.append({"title": f"{family} on {split}{protocol}", "unit": unit, "series": series})
    return found


def _estimates(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Values with their intervals at the steps that have a number; of more than the page draws, evenly spaced ones."""
    kept = [row for row in rows if isinstance(row.get(name), int | float)]
    kept = kept[:: -(-len(kept) // POINTS) or 1]
    factor = 100 if name.startswith(SHARES) else 1
    ends = {
        key: short(np.array([row.get(f"{name}/{key}", row[name]) for row in kept], dtype=float) * factor)
        for key in ("low", "high")
        if all(f"{name}/{key}" in row for row in kept)
    }
    return {
        "step": [row["step"] for row in kept],
        "mean": short(np.array([row[name] for row in kept], dtype=float) * factor),
        **ends,
        "interval": True,
    }


def _metric_charts(
    title: str, names: Sequence[str], runs: Sequence[WatchedRun], points: int, recipe: str
) -> list[dict[str, Any]]:
    """One chart for each kind of number among some metrics, in the words of a recipe."""
    describe = partial(describe_metric, definitions=metric_definitions(recipe))
    kinds, found = by_kind(names, describe), []
    for kind, chosen in kinds.items():
        unit = UNITS.get(kind, "")
        series = [
            {"run": run.name, "label": label(name), **_scaled(run.metrics.thinned(name, points), unit)}
            for run in runs
            for name in chosen
            if name in run.metrics.names()
        ]
        # of a metric that moves in any run, the run in which it stays 0 is the one to see
        moving = {one["label"] for one in series if any(one["mean"])}
        series = [one for one in series if one["label"] in moving]
        if series:
            subject = chart_title(title, recipe) if title in CHARTS else title
            shown = subject if len(kinds) == 1 else f"{subject}, {kind}"
            about = {label(name): describe(name) or "" for name in chosen}
            found.append({"title": shown, "unit": unit, "log": title in LOGARITHMIC, "series": series, "about": about})
    return found


def _scaled(curve: dict[str, list[float]], unit: str) -> dict[str, list[float]]:
    if unit != "%":
        return curve
    return {key: values if key == "step" else short(100 * np.array(values)) for key, values in curve.items()}


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
"""Maximum number of runs that one request may overlay."""


class WatchServer(ThreadingHTTPServer):
    """Server for some folders; `address` contains the token."""

    daemon_threads = True

    def __init__(self, folders: WatchedFolders, port: int) -> None:
        self.folders = folders
        self.token = secrets.token_urlsafe(24)
        self.lock = threading.Lock()
        """Lock held while the folders are read or shown."""
        super().__init__((HOST, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that disconnects before the reply is not an error."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @property
    def cookie(self) -> str:
        """Name of the cookie; browsers share cookies between the ports of a host."""
        return f"mmrl-watch-{self.server_port}"

    @property
    def address(self) -> str:
        """Address at which a browser opens the page."""
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
        with open_file(place) as file:
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
        """Do not log requests."""


def _overview(folders: WatchedFolders, query: dict[str, str]) -> dict[str, Any]:
    folders.refresh()
    return {
        "runs": [run.status() for run in folders.runs.values()],
        "comparisons": folders.comparisons(),
        "behind": folders.behind,
        "colours": COLOURS,
    }


def _curves(folders: WatchedFolders, query: dict[str, str]) -> dict[str, Any] | None:
    names = query.get("runs", "").split("\0")  # which no folder's name contains
    runs = [folders.runs[name] for name in names if name in folders.runs][:MOST_RUNS]
    drawn = charts(runs)
    shown = drawn if query.get("more") == "1" else [chart for chart in drawn if not chart.get("more")]
    return {"charts": shown, "differences": differences(runs)}


def _samples(folders: WatchedFolders, query: dict[str, str]) -> dict[str, Any] | None:
    run, step = folders.runs.get(query.get("run", "")), query.get("step", "")
    return run.samples(int(step)) if run and re.fullmatch(r"\d{1,12}", step) else None


ANSWERS = {"/runs.json": _overview, "/curves.json": _curves, "/samples.json": _samples}
