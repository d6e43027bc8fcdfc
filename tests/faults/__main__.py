"""`python -m tests.faults`: kills, damaged inputs and hostile surroundings; a table, a JSON file, exit 1 at a fault."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a process with threads cannot be forked safely
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any


def main() -> int:
    """Run the campaign that the arguments ask for."""
    args = _parse()
    started = time.monotonic()
    scratch = Path(args.scratch or tempfile.mkdtemp(prefix="mmrl-faults-"))
    result = _run(args, scratch) | {"seed": args.seed, "command": " ".join(["python -m tests.faults", *sys.argv[1:]])}
    result["seconds"] = round(time.monotonic() - started)
    text = json.dumps(result, indent=1)
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(args.out).write_text(text + "\n", encoding="utf-8")
    _say(_table(result))
    _say(f"{result['seconds']} s; result: {args.out}")
    bad = bool(result["faults"] or result["left_behind"])
    if bad:
        _say(f"{len(result['faults'])} faults; the folders of runs that differ are kept in {scratch}")
    else:
        shutil.rmtree(scratch, ignore_errors=True)
    return int(bad)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="signals over all recipes; default 100")
    parser.add_argument("--mutations", type=int, default=5000, help="damaged inputs over all kinds; default 5000")
    parser.add_argument(
        "--surroundings", type=int, default=4, help="runs in each of the hostile surroundings; default 4"
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything")
    parser.add_argument("--recipes", default="", help="only these, by comma")
    parser.add_argument("--kinds", default="", help="only kinds of input whose name contains one of these, by comma")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each kind, to repeat one")
    parser.add_argument("--out", default="runs/faults.json", help="where the result goes; default runs/faults.json")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing new after so long")
    parser.add_argument("--scratch", help="folder for the runs; default: a temporary one")
    return parser.parse_args()


def _run(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    from mmrl.recipes import RECIPES
    from tests.faults.batches import InputCampaign
    from tests.faults.inputs import KINDS
    from tests.faults.kills import KillCampaign
    from tests.faults.surroundings import SurroundingsCampaign

    recipes = [name for name in RECIPES if not args.recipes or name in args.recipes.split(",")]
    kinds = tuple(kind for kind in KINDS if any(part in kind.name for part in args.kinds.split(",")))
    until = time.monotonic() + 60 * args.minutes
    kills = KillCampaign(scratch / "kills", args.seed, recipes)
    inputs = InputCampaign(scratch / "inputs", args.seed, kinds)
    surroundings = SurroundingsCampaign(kills, args.seed)
    if args.kills:
        kills.run(args.kills, _say, until)
    if args.surroundings:
        surroundings.run(args.surroundings, _say)
    if args.mutations:
        inputs.run(args.mutations, _say, args.first, until)
    return {
        "kills": dict(kills.kills),
        "signals": dict(kills.signals),
        "runs": dict(kills.runs),
        "inputs": {name: dict(counts) for name, counts in inputs.counts.items()},
        "surroundings": {name: dict(counts) for name, counts in surroundings.counts.items()},
        "faults": [*kills.faults, *inputs.faults, *surroundings.faults],
        "left_behind": [*kills.nursery.left_behind, *inputs.nursery.left_behind],
    }


def _table(result: dict[str, Any]) -> str:
    """Kills by recipe and by stage, inputs and surroundings by outcome."""
    by_recipe: Counter[str] = Counter()
    by_stage: Counter[str] = Counter()
    for name, count in result["kills"].items():
        recipe, _, stage = name.partition(" ")
        by_recipe[recipe] += count
        by_stage[stage] += count
    rows = [("kills", sum(by_recipe.values()), f"{sum(result['runs'].values())} runs resumed to their end")]
    rows += [(f"  {name}", count, "") for name, count in by_recipe.items()]
    rows += [(f"  {name}", count, "") for name, count in result["signals"].items()]
    rows += [(f"  at {name}", count, "") for name, count in sorted(by_stage.items())]
    for title in ("inputs", "surroundings"):
        rows += [(title, sum(sum(counts.values()) for counts in result[title].values()), "")]
        for name, counts in result[title].items():
            outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
            rows.append((f"  {name}", sum(counts.values()), outcomes))
    rows += [("faults", len(result["faults"]), ""), ("processes left behind", len(result["left_behind"]), "")]
    return "\n".join(f"{name:<34} {count:>6}  {note}".rstrip() for name, count, note in rows)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
