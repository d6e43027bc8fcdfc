"""A browser for the tests that need one; without one they are skipped with a reason that says what to install."""

import pytest

from mmrl.errors import UserError
from mmrl.gui.browser.browser import Browser, BrowserSettings, require_chromium


@pytest.fixture(scope="session")
def chromium():
    """Skip tests that need a browser if there is none."""
    try:
        require_chromium()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def browser(chromium):
    """One browser per module: the driver's loop counts as running in this thread until it is closed."""
    running = Browser(BrowserSettings(timeout_s=60))
    yield running
    running.close()
