"""`python -m benchmarks ROOM`: time and memory compared with row-per-sample code or another library, as JSON."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import ROOMS, run
from benchmarks.harness import BenchOptions
from mmrl.errors import UserError
from mmrl.files import output_file, output_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparisons of a room; exit code 1 if an arm or a check failed, 2 for invalid usage."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("room", choices=list(ROOMS), help="what to benchmark")
    add("--against", choices=["trl"], help="also compare with this library; needs the extra `bench`")
    add("--only", metavar="NAME", action="append", default=[], help="run only this comparison; can be repeated")
    add("--blocks", metavar="N", type=int, default=0, help="processes per arm, run in turns; default 5")
    add("--repetitions", metavar="N", type=int, default=0, help="timed repetitions per process; default 2")
    add("--threads", metavar="N", type=int, default=1, help="threads per process; default 1")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="device to run on; default cpu")
    families = ["qwen2_5_vl", "qwen3_vl", "smolvlm", "gemma3", "qwen3"]
    add("--family", choices=families, default="qwen2_5_vl", help="model to build; the last three: only --only step")
    add("--model", metavar="DIR", type=Path, help="folder or packaged name of a model to use instead of building one")
    add("--folder", metavar="DIR", type=output_folder, default=BenchOptions.folder, help="where built models are kept")
    add("--out", metavar="FILE", type=output_file, help="also write the JSON to this file")
    add("--quick", action="store_true", help="smoke test with tiny sizes")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        given = vars(parser.parse_args(argv))
        room, out = given.pop("room"), given.pop("out")
        with contextlib.redirect_stdout(sys.stderr):  # what the arms print; standard output is the result's
            text, passed = run(room, BenchOptions(**given), out)
    except UserError as error:
        sys.stderr.write(f"benchmarks: {error}\n")
        return 2
    sys.stdout.write(f"{text}\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
