"""One Chromium per process, driven by playwright, with time limits and restarts after failures or many pages.

playwright's synchronous API is bound to its thread and refuses to run inside an asyncio loop, so environments run
in processes, with one browser each and one context per environment.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib.util
import math
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.errors import UserError
from mmrl.fields import bounded

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

EXECUTABLE_VARIABLE = "MMRL_CHROMIUM"
"""Environment variable with the path of the browser executable."""
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
MAC_PROGRAMS = (
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
INSTALL_BROWSER = (
    "sudo apt-get install -y --no-install-recommends chromium fonts-dejavu-core fonts-liberation (or install Chrome, "
    f"or set {EXECUTABLE_VARIABLE} to the browser executable)"
)
WATCH_SECONDS = 0.1
"""Seconds between checks of the current call's deadline."""
INSTALL_PACKAGE = "pip install 'mmrl-suite[gui]'"
NO_HOSTS = "--host-resolver-rules=MAP * ~NOTFOUND"
HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?")
"""A host name or an IPv4 address, in lower case."""
ARGUMENTS = (
    "--no-sandbox",  # containers have no user namespaces for it; pages are local files, and offline
    "--disable-gpu",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--disable-lcd-text",  # subpixel colours would depend on the position of a text
    "--disable-partial-raster",  # redrawn parts would blend their round corners twice
    "--font-render-hinting=none",
    "--force-color-profile=srgb",
    # an offline context still lets WebTransport send datagrams, even to localhost; the second flag blocks WebRTC's
    NO_HOSTS,
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
)


class BrowserFailure(Exception):  # noqa: N818 - the suite's word for events that are nobody's mistake
    """The browser died, hung or could not show a page; the episode has no result."""


@dataclass(frozen=True)
class BrowserSettings:
    """Settings of the browser."""

    executable: str = ""
    """Browser executable. Default: MMRL_CHROMIUM, else a Chromium, Chrome or Edge on the PATH."""
    timeout_s: float = bounded(20.0, above=0)
    """Time limit for one call (loading a page, a click, a screenshot); after twice as long the browser is killed."""
    start_timeout_s: float = bounded(60.0, above=0)
    """Time limit for starting the browser."""
    pages_per_start: int = bounded(2000, at_least=1)
    """Number of pages after which the browser restarts, because its memory grows."""
    allow_hosts: tuple[str, ...] = ()
    """Hosts that pages may reach, such as 127.0.0.1 or shop.test, at any port. Other hosts cannot even be resolved, and
    requests for them are counted. Default: none, the browser is offline."""

    def validate(self) -> None:
        """Check the names of the hosts; raises UserError."""
        if isinstance(self.allow_hosts, str):
            raise UserError(f"allow_hosts is the text {self.allow_hosts!r}; expected a list of hosts")
        for host in self.allow_hosts:
            # a part of the browser's command line
            if not isinstance(host, str) or not HOST.fullmatch(host):
                raise UserError(
                    f"allow_hosts has {host!r}; expected the name of a host or its IPv4 address, in lower case, "
                    "without scheme, port or path"
                )


class Browser:
    """A running Chromium."""

    def __init__(self, settings: BrowserSettings | None = None) -> None:
        self.settings = settings or BrowserSettings()
        self.settings.validate()
        self.generation = 0
        """Number of starts so far; contexts of earlier starts no longer exist."""
        self.restarts = 0
        """Number of restarts after the browser died or was killed at a time limit."""
        self.pages = 0
        """Pages loaded since the last start."""
        self.pid = 0
        """Process id of the browser."""
        self._open_contexts: set[BrowserContext] = set()
        self._thread = threading.get_ident()
        self._playwright: Any = None
        self._browser: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._deadline = math.inf
        self._ended = threading.Event()
        self._program = require_chromium(self.settings.executable)
        self._start()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open_context(self, width: int, height: int, scale: float = 1.0, locale: str = "en-US") -> BrowserContext:
        """A separate context (cookies, storage, windows), offline unless hosts are allowed; viewport in CSS pixels."""
        self._check_thread()
        with self.limited("opening a context"):
            context: BrowserContext = self._browser.new_context(
                viewport={"width": width, "height": height},
                device_scale_factor=scale,
                # nothing from the network may enter an episode, but for hosts that the user allows
                offline=not self.settings.allow_hosts,
                accept_downloads=False,
                locale=locale,
                timezone_id="UTC",  # or a page that shows a time would depend on the machine
                reduced_motion="reduce",
                service_workers="block",  # their requests bypass the routes that `GuardedPage` checks
            )
        context.set_default_timeout(1000 * self.settings.timeout_s)
        self._open_contexts.add(context)
        return context

    def close_context(self, context: BrowserContext) -> None:
        """Close a context; it may already be closed."""
        # A context of an earlier start is not in the set, and closing it would talk to a dead browser.
        known = context in self._open_contexts
        self._open_contexts.discard(context)
        if known and self.is_alive():
            with contextlib.suppress(BrowserFailure), self.limited("closing a context"):
                context.close()

    def is_alive(self) -> bool:
        """Whether the browser is connected."""
        return self._browser is not None and self._browser.is_connected()

    def is_old(self) -> bool:
        """Whether enough pages were loaded for a restart and no other environment would lose its page."""
        return self.pages >= self.settings.pages_per_start and len(self._open_contexts) <= 1

    def restart(self, after_failure: bool = True) -> None:
        """Restart the browser; all contexts are lost."""
        self._check_thread()
        self.restarts += after_failure
        self.close()
        self._start()

    @contextlib.contextmanager
    def limited(self, what: str) -> Iterator[None]:
        """Run playwright calls; a browser that hangs is killed, and every failure is a `BrowserFailure`.

        playwright itself limits only some calls: a script that never returns would block `evaluate` for ever.
        """
        from playwright.sync_api import Error

        # Calls nest; an inner one must not extend the time of the outer one.
        outer = self._deadline
        # twice playwright's own limit, which should come first and leaves the browser alive
        self._deadline = min(outer, time.monotonic() + 2 * self.settings.timeout_s)
        try:
            yield
        except Error as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise BrowserFailure(f"{what} failed: {reason}") from error
        finally:
            self._deadline = outer

    def kill(self) -> None:
        """Kill the browser's process, as an out-of-memory killer would."""
        with contextlib.suppress(ProcessLookupError):
            if self.pid:
                # SIGKILL: a browser that hangs ignores everything else
                os.kill(self.pid, signal.SIGKILL)

    def _start(self) -> None:
        from playwright.sync_api import Error, sync_playwright

        _refuse_asyncio()
        try:
            self._playwright = sync_playwright().start()
            # A killed browser leaves temporary files; one is a socket, whose path must be short.
            self._folder = tempfile.TemporaryDirectory(prefix="mmrl-", ignore_cleanup_errors=True)
            self._browser = self._playwright.chromium.launch(
                executable_path=self._program,
                headless=True,
                args=self._arguments(),
                env={**os.environ, "TMPDIR": self._folder.name},
                timeout=1000 * self.settings.start_timeout_s,
                handle_sigint=False,  # the process that runs the environment decides what a signal means
                handle_sigterm=False,
                handle_sighup=False,
            )
            # playwright does not expose the pid, which `kill` needs when the browser no longer answers.
            session = self._browser.new_browser_cdp_session()
            processes = session.send("SystemInfo.getProcessInfo")["processInfo"]
            self.pid = next(int(entry["id"]) for entry in processes if entry["type"] == "browser")
        except Error as error:
            self.close()
            reason = " ".join(str(error).split())[:500]
            raise BrowserFailure(f"{self._program} did not start: {reason}") from error
        self.generation += 1
        self.pages = 0
        # One event per start: the watcher of the last browser must not be revived, or it would kill this one.
        self._ended = threading.Event()
        threading.Thread(target=self._watch, args=(self._ended,), daemon=True).start()

    def _arguments(self) -> list[str]:
        """Command line of the browser, which resolves the allowed hosts alone."""
        hosts = self.settings.allow_hosts
        if not hosts:
            return list(ARGUMENTS)
        rules = "".join(f" , EXCLUDE {host}" for host in hosts)
        # a proxy would resolve names by itself
        return [*(f"{each}{rules}" if each == NO_HOSTS else each for each in ARGUMENTS), "--no-proxy-server"]

    def _watch(self, ended: threading.Event) -> None:
        """Kill the browser when a call exceeds its deadline; a timer per call would cost more than a click."""
        while not ended.wait(WATCH_SECONDS):
            if time.monotonic() > self._deadline:
                self.kill()

    def close(self) -> None:
        """Close the browser."""
        # Closing a browser that hangs would hang as well; a killed one loses nothing.
        self._ended.set()
        self._open_contexts.clear()
        self.kill()
        self.pid = 0
        if self._browser is not None:
            with contextlib.suppress(Exception):  # the driver may be gone too
                self._browser.close()
        if self._playwright is not None:
            with contextlib.suppress(Exception):
                self._playwright.stop()
        if self._folder is not None:
            self._folder.cleanup()
        self._browser = self._playwright = self._folder = None

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise UserError("a browser belongs to the thread that started it; run environments in processes instead")


def find_chromium(executable: str = "") -> str | None:
    """Path of a Chromium, Chrome or Edge executable, or None."""
    named = executable or os.environ.get(EXECUTABLE_VARIABLE, "")
    if named:
        found = shutil.which(os.path.expanduser(named))
        if found is None:
            origin = "the option `executable`" if executable else EXECUTABLE_VARIABLE
            raise UserError(f"{origin} is {named!r}, which is not an executable program; {INSTALL_BROWSER}")
        return found
    on_path = next(filter(None, map(shutil.which, PROGRAMS)), None)
    return on_path or next((path for path in MAC_PROGRAMS if Path(path).is_file()), None)


def require_chromium(executable: str = "") -> str:
    """Path of the browser executable; raises UserError if it or playwright is missing."""
    if importlib.util.find_spec("playwright") is None:
        raise UserError(f"browser screens need playwright, which is not installed: {INSTALL_PACKAGE}")
    found = find_chromium(executable)
    if found is None:
        raise UserError(f"browser screens need Chromium, but there is none on the PATH: {INSTALL_BROWSER}")
    return found


def process_browser(settings: BrowserSettings | None = None) -> Browser:
    """The browser shared by the environments of this process; it closes when the process exits."""
    wanted = settings or BrowserSettings()
    # By process id, because a forked child inherits the entry but must not use its parent's browser.
    running = _RUNNING.get(os.getpid())
    if running is None:
        _RUNNING[os.getpid()] = running = Browser(wanted)
        atexit.register(running.close)
    elif running.settings != wanted:
        raise UserError(
            f"this process already has a browser with settings {running.settings}; it cannot open another with {wanted}"
        )
    return running


def _refuse_asyncio() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UserError(
        "a browser cannot be driven inside a running asyncio loop (notebooks have one, and so do threads in which "
        "another browser runs); run it in a separate process"
    )


_RUNNING: dict[int, Browser] = {}
"""Browsers by process id, because a forked child must not use its parent's."""
