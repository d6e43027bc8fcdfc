"""Clip-Cov by verl: a band of covariances that holds one decision, and a wide one that is left out as a whole."""

from typing import Any

from tests.golden.make.peers import write
from tests.golden.make.tokens import Verl, batch

WIDE = {"share": 1.0, "cov_low": 0.1, "cov_high": 5.0, "low": 0.2, "high": 0.2}


def main() -> None:
    inputs = batch()
    peers = [peer(inputs, 2e-4, 1.0, 5.0, 1.0, 1.0), peer(inputs, *WIDE.values()) | {"changes": {"clip": WIDE}}]
    write("clip_cov", "Clip-Cov, arXiv 2505.22617", inputs, peers)


def peer(inputs: dict[str, Any], share: float, least: float, most: float, low: float, high: float) -> dict[str, Any]:
    verl = Verl(inputs)
    advantage = verl.advantage("compute_grpo_outcome_advantage")
    mode = {"clip_cov_ratio": share, "clip_cov_lb": least, "clip_cov_ub": most}
    found = [verl.policy_loss("clip_cov", advantage, "token-mean", low, high, mode=mode) for _ in range(5)]
    assert all(loss == found[0] for loss in found), "which decisions are left out must not depend on the draw"
    return verl.answer(advantage, found[0])


if __name__ == "__main__":
    main()
