"""Entry point of `python -m mmrl.cli`."""

import sys

from mmrl.cli.program import main

if __name__ == "__main__":
    sys.exit(main())
