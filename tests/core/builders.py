"""Small rollouts for the tests of the core."""

import json
import math
from dataclasses import dataclass

import torch

from mmrl.core import Rollouts
from tests.core.reference import GOLDEN


def golden():
    data = json.loads(GOLDEN.read_text(encoding="utf-8"))
    data["batch"]["reward"] = [math.nan if r is None else r for r in data["batch"]["reward"]]
    return data


def rollouts_from(batch, dtype=torch.float64, **changes):
    tensors = {
        name: torch.tensor(batch[name], dtype=dtype) for name in ("mask", "logp_old", "reward", "logp_ref", "values")
    }
    tensors |= {name: torch.tensor(batch[name]) for name in ("group", "turn")}
    return Rollouts(**(tensors | changes))


def random_rollouts(seed=0, groups=4, samples=3, width=6, dtype=torch.float64, **changes):
    """Rows of random length without gaps, all optional fields set, payload attached."""
    g = torch.Generator().manual_seed(seed)
    rows = groups * samples
    lengths = torch.randint(1, width + 1, (rows,), generator=g)
    mask = (torch.arange(width)[None] < lengths[:, None]).to(dtype)

    def noise():
        return torch.randn(rows, width, generator=g, dtype=dtype)

    fields = {
        "group": torch.arange(groups).repeat_interleave(samples),
        "mask": mask,
        "logp_old": -noise().abs() - 0.1,
        "reward": torch.randn(rows, generator=g, dtype=dtype),
        "payload": Rows([f"prompt {i}" for i in range(groups)], torch.arange(rows)),
        "reward_terms": {"accuracy": torch.randint(0, 2, (rows,), generator=g).to(dtype)},
        "logp_ref": -noise().abs() - 0.1,
        "values": noise(),
        "entropy": noise().abs(),
        "turn": torch.where(mask > 0, torch.arange(width)[None] // 2, -1),
        "extras": {"kl_weight": torch.rand(rows, generator=g, dtype=dtype), "noise": noise()},
    }
    return Rollouts(**(fields | changes))


@dataclass
class Rows:
    """A payload that stores prompts once per group and one id per row."""

    prompts: list
    ids: torch.Tensor

    def select(self, rows, groups):
        return Rows([self.prompts[i] for i in groups.tolist()], self.ids[rows])

    @classmethod
    def concat(cls, parts):
        return cls([p for part in parts for p in part.prompts], torch.cat([part.ids for part in parts]))

    def to(self, device):
        return Rows(self.prompts, self.ids.to(device))
