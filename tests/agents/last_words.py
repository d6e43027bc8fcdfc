"""`Talk` with an episode that kills its trainer."""

import os
import signal
from pathlib import Path

from tests.agents.talk import Talk


class LastWords(Talk):
    """Kills the process that a file names in the second turn of an episode, once.

    Args:
        folder: where the file `victim` may be.
        after: episodes that come to their end before.
    """

    def __init__(self, folder, after):
        self.victim, self.left = Path(folder) / "victim", after

    def step(self, action):
        if len(self.said) == 1:
            self.left -= 1
            if self.left < 0 and self.victim.exists():
                pid = int(self.victim.read_text())
                self.victim.unlink()
                os.kill(pid, signal.SIGKILL)
        return super().step(action)
