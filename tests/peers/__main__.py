"""Compare the catalogue with the installed packages of other trainers and print the table; `make test-peers` does so.

It exits with 1 where a row and a package differ that should not, or agree though CONVENTIONS says that they differ, and
writes record.json, from which the documentation has its table, with --record.
"""

import json
import sys
from typing import Any

import torch

from mmrl.core import PolicyOutputs, all_objectives, all_preferences
from mmrl.files import write_atomically
from tests.golden.make.peers import gradient, tensors
from tests.golden.test_preference import compute as compute_pairs
from tests.golden.test_preference import labelled
from tests.golden.test_tokens import compute
from tests.peers.adaptor import CONVENTIONS, answers
from tests.peers.record import RECORD, table

ORDER = ("verl", "trl", "skyrl", "openrlhf")
"""Packages in the table."""


def main() -> int:
    """Compare, print, record."""
    rows: dict[str, dict[str, Any]] = {name: {} for name in (*all_objectives(), *all_preferences())}
    programs, bad = set(), []
    for name, inputs, peer in answers():
        package = peer["program"].split()[0]
        found, allowed = difference(name, inputs, peer), peer["relative"]
        reason = CONVENTIONS.get((name, package), "")
        programs.add(peer["program"])
        if (found > allowed) != bool(reason):
            bad.append(f"{name} and {package}: {found:.1e} apart, {reason or f'{allowed:.0e} allowed'}")
        before = rows[name].get(package, {"apart": 0.0})["apart"]
        rows[name][package] = {"apart": float(f"{max(found, before):.1e}")} | ({"differs": reason} if reason else {})
    record = {
        "programs": sorted(programs, key=lambda program: ORDER.index(program.split()[0])),
        "rows": {name: peers for name, peers in rows.items() if peers},
    }
    sys.stdout.write(table(record))
    sys.stdout.write("".join(f"{line}\n" for line in bad))
    if "--record" in sys.argv and not bad:
        write_atomically(RECORD, json.dumps(record, indent=1) + "\n")
    return 1 if bad else 0


def difference(name: str, inputs: dict[str, Any], peer: dict[str, Any]) -> float:
    """Largest difference of advantages, loss and gradient, each as a share of the peer's largest number."""
    if name in all_preferences():
        ours = pairwise(name, inputs, peer)
    else:
        ours = compute(name, peer.get("changes", {}), vars(tensors(inputs)))
    size = float(ours["gradient"].abs().sum())  # a loss is a sum of terms that cancel
    shares = []
    for key in ("advantage", "loss", "gradient"):
        if key in peer:
            expected = torch.as_tensor(peer[key], dtype=torch.float64)
            scale = max(float(expected.abs().max()), size if key == "loss" else 0.0)
            shares.append(float((ours[key].detach() - expected).abs().max()) / max(scale, 1e-300))
    return max(shares)


def pairwise(name: str, inputs: dict[str, Any], peer: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Loss and gradient of an objective for pairs, or for answers with a label each."""
    if "labels" not in peer:
        output, slope = compute_pairs(name, peer["options"], tensors(inputs))
        return {"loss": output.loss, "gradient": slope}
    objective, rollouts, logp = labelled(tensors(inputs), peer)
    loss = objective.step_loss(PolicyOutputs(logp), rollouts, objective.denominators(rollouts)).loss
    return {"loss": loss, "gradient": gradient(loss, logp)}


if __name__ == "__main__":
    sys.exit(main())
