"""`mmrl` with a watch that holds a process for lost after seconds, for tests."""

import sys

from mmrl.cli import main
from mmrl.training import machines

machines.LOST_S, machines.SILENCE_S, machines.BEAT_S = 8.0, 3.0, 0.5

if __name__ == "__main__":
    sys.exit(main())
