"""A server that runs beside the test."""

import threading

import pytest

from mmrl.cli.watch.folders import WatchedFolders
from mmrl.cli.watch.server import WatchServer
from tests.cli.watch.runs import make_run


@pytest.fixture
def server(tmp_path):
    """A server of one run, `run`."""
    with WatchServer(WatchedFolders([make_run(tmp_path / "run")]), 0) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()
