"""A browser for the tests that need one; where there is none they are skipped, and the reason says what to install."""

import pytest

from mmrl.errors import UserError
from mmrl.gui.browser.browser import Browser, BrowserSettings, require_chromium


@pytest.fixture(scope="module")
def browser():
    """One for a module: the driver's loop counts as running in this thread until it is closed."""
    try:
        require_chromium()
    except UserError as error:
        pytest.skip(str(error))
    running = Browser(BrowserSettings(timeout_s=5))
    yield running
    running.close()
