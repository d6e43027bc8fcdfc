"""Clusters of answers and their entropies by the code of semantic entropy (Farquhar et al., Nature 630, 2024)."""

import numpy as np

from tests.golden.make.peers import Clone, Made, numbers

FILE = "semantic_uncertainty/uncertainty/uncertainty_measures/semantic_entropy.py"
CONTRADICTION, NEUTRAL, ENTAILMENT = range(3)
TABLE = [
    [2, 2, 1, 0, 2, 1],
    [2, 2, 1, 0, 1, 0],
    [1, 1, 2, 2, 1, 1],
    [0, 0, 2, 2, 0, 1],
    [1, 1, 1, 0, 2, 0],
    [1, 0, 1, 1, 0, 2],
]
"""Verdict whether the text of a row entails that of a column: 4 follows from 0, but not the other way round."""


class Table:
    """An entailment model that looks verdicts up."""

    def check_implication(self, one: str, other: str, example: None = None) -> int:
        return TABLE[int(one)][int(other)]


def make(path: str) -> Made:
    clone = Clone(path, "jlko/semantic_uncertainty", "a8d9aa8cecd5f3bec09b19ae38ab13552e0846f4")
    inputs = {"verdicts": TABLE, "logp": numbers(12, 6, low=-2.0, high=-0.1), "ids": [0, 0, 1, 1, 2, 3]}
    cluster, *entropies = (
        clone.function(FILE, name)
        for name in ("get_semantic_ids", "cluster_assignment_entropy", "predictive_entropy_rao", "predictive_entropy")
    )
    texts = [str(number) for number in range(len(TABLE))]
    clusters = {str(strict): cluster(texts, Table(), strict_entailment=strict) for strict in (True, False)}
    masses = clone.function(FILE, "logsumexp_by_id")(inputs["ids"], np.array(inputs["logp"]))
    counts, rao, monte_carlo = entropies
    found = {"counts": counts(inputs["ids"]), "likelihood": rao(masses), "monte_carlo": monte_carlo(masses)}
    calls = ("get_semantic_ids", "logsumexp_by_id", "cluster_assignment_entropy", "predictive_entropy_rao")
    peer = {"program": clone.name, "calls": [f"{FILE}:{name}" for name in (*calls, "predictive_entropy")]}
    peer |= {"relative": 1e-12, "clusters": clusters, "entropy": found}
    return "Semantic entropy, Nature 630 (2024), in SEED-GRPO, arXiv 2505.12346", inputs, [peer], clone
