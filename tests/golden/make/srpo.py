"""SRPO by its public code, siiRL: the progress reward and the actor's loss."""

import re
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import torch

from tests.golden.make.peers import Clone, Made, gradient, numbers, tensors
from tests.golden.make.tokens import Verl, batch

COMMIT = "af00a771817324f55f40c7b980d925cb008db6d8"


def make(path: str) -> Made:
    clone = Clone(path, "sii-research/siiRL", COMMIT)
    inputs = batch()
    advantage = Verl(inputs).advantage("compute_grpo_outcome_advantage")
    inputs |= {"advantage": advantage.tolist(), **episodes()}
    loss, slope = actor_loss(clone, inputs, advantage)
    found = progress(clone, inputs)
    peer = {
        "program": clone.name,
        "calls": [
            "siirl/utils/reward_score/embodied.py:compute_embodied_reward",
            "siirl/dag_worker/core_algos.py:compute_policy_loss",
        ],
        "relative": 1e-12,
        "loss": loss,
        "gradient": slope,
        "progress": np.array([row["score"] for row in found]),
        "distance": [row.get("distance_to_success") for row in found],
    }
    return "SRPO, arXiv 2511.15605", inputs, [peer], clone


def episodes() -> dict:
    """Embeddings of episodes of four tasks: two clusters, no cluster, no success, and an episode without embedding."""
    points = np.array(numbers(7, 26, 4, low=-2, high=2))
    points[0:5] = np.array([1.0, 2.0, 0.0, -1.0]) + 0.02 * points[0:5]
    points[5:8] = np.array([-2.0, 0.5, 1.5, 3.0]) + 0.02 * points[5:8]
    points[11] = 0.0
    success = [True] * 8 + [False] * 5 + [True, False, False, False, True] + [False] * 3 + [True, True] + [False] * 3
    tasks = [0] * 13 + [1] * 5 + [2] * 3 + [3] * 5
    return {"embedding": points.round(5).tolist(), "success": success, "task": tasks}


def progress(clone: Clone, inputs: dict) -> list[dict]:
    from scipy import special
    from scipy.spatial.distance import cdist
    from sklearn.cluster import DBSCAN
    from sklearn.preprocessing import StandardScaler

    quiet = SimpleNamespace(**{level: lambda *_: None for level in ("info", "error", "warning", "debug")})
    sys.modules.setdefault("loguru", ModuleType("loguru")).logger = quiet
    file = "siirl/utils/reward_score/embodied.py"
    names = {"re": re, "special": special, "cdist": cdist, "DBSCAN": DBSCAN, "StandardScaler": StandardScaler}
    names |= {name: clone.function(file, name, re=re) for name in ("_tensor_to_str_list", "_extract_task_name")}
    texts = [f"libero_spatial_task_{task}_trial_{i}".ljust(40, "\0") for i, task in enumerate(inputs["task"])]
    given = {
        "responses": torch.zeros(len(texts), 1),
        "complete": torch.tensor(inputs["success"]),
        "finish_step": torch.ones(len(texts)),
        "vjepa_embedding": torch.tensor(inputs["embedding"], dtype=torch.float64),
        "task_file_name": torch.tensor([list(text.encode()) for text in texts], dtype=torch.uint8),
    }
    return clone.function(file, "compute_embodied_reward", **names)(given)


def actor_loss(clone: Clone, inputs: dict, advantage: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    b = tensors(inputs)
    b.logp.requires_grad_()
    functional, algos = "siirl/utils/model_utils/torch_functional.py", "siirl/dag_worker/core_algos.py"
    masked_sum = clone.function(functional, "masked_sum")
    masked = {"masked_sum": masked_sum, "masked_mean": clone.function(functional, "masked_mean", masked_sum=masked_sum)}
    names = {"siirl_F": SimpleNamespace(**masked)}
    names["agg_loss"] = clone.function(algos, "agg_loss", **names)
    compute = clone.function(algos, "compute_policy_loss", **names)
    bounds = {"cliprange_low": 0.2, "cliprange_high": 0.28, "clip_ratio_c": 3.0}
    average = "seq-mean-token-mean"
    loss = compute(b.logp_old, b.logp, advantage, b.mask, **bounds, loss_agg_mode=average)[0]
    return loss.detach(), gradient(loss, b.logp)
