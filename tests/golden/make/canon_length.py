"""CANON by its public code: its estimators by length or by entropy, and the policy loss of its fork of verl."""

from collections import defaultdict
from typing import Any

from tests.golden.make.forks import CORE, fork_loss, fork_names, token_rewards
from tests.golden.make.peers import Clone, Made, tensors
from tests.golden.make.tokens import batch

COMMIT = "7d6f814fb71f3d6a30e5312f68973c5207bd142c"
CASES = ({}, {"inter": 0.5, "alpha": 0.9, "beta": 0.1})
"""Changes of the estimator; the first is its script's."""


def make(path: str) -> Made:
    clone = Clone(path, "biuboomc/CANON", COMMIT)
    peers = answers(clone, batch(), "compute_dr_length_on_mean_group_outcome_advantage")
    return "CANON, arXiv 2509.23962", batch(), peers, clone


def answers(clone: Clone, inputs: dict[str, Any], name: str, **given: Any) -> list[dict[str, Any]]:
    """Its numbers for all cases; the length that it divides advantages by is moved to the loss."""
    estimate = clone.function(CORE, name, defaultdict=defaultdict, **fork_names(clone))
    named = {"inter": "_lambda", "alpha": "alpha", "beta": "beta"}
    peers = []
    for case in CASES:
        options = {named[key]: value for key, value in case.items()}
        found = [
            estimate(
                token_rewards(inputs), tensors(inputs).mask, index=inputs["group"], max_length=n, **given, **options
            )
            for n in (1, 8192)
        ]
        loss = fork_loss(clone, inputs, found[1][0], "seq-mean-token-sum", 0.2, 0.28, 3.0)
        calls = [f"{CORE}:{call}" for call in (name, "compute_policy_loss")]
        peer = {"program": clone.name, "calls": calls, "relative": 1e-12}
        peers.append(peer | {"changes": {"advantage": case}, "advantage": found[0][0]} | loss)
    return peers
