"""Small rollouts for the tests of the core."""

import json
import math
from dataclasses import dataclass

import torch

from mmrl.core import Payload, Rollouts, per_group, per_row
from tests.core.reference import REFERENCE


def reference_numbers():
    data = json.loads(REFERENCE.read_text(encoding="utf-8"))
    data["batch"]["reward"] = [math.nan if r is None else r for r in data["batch"]["reward"]]
    return data


def rollouts_from(batch, dtype=torch.float64, **changes):
    tensors = {
        name: torch.tensor(batch[name], dtype=dtype)
        for name in ("mask", "logp_old", "reward", "logp_ref", "values", "logp_rollout")
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
        "logp_rollout": -noise().abs() - 0.1,
    }
    fields["extras"] |= block_inputs(g, fields["group"], fields["turn"], noise)
    return Rollouts(**(fields | changes))


def block_inputs(g, group, turn, noise):
    """Further data that blocks need in `extras`; `mmrl.training.objectives.SCORES` describes them."""
    rows, width = turn.shape
    return {
        "answer": torch.randint(0, 2, (rows,), generator=g),
        "tokens": torch.randint(0, 5, (rows, width), generator=g),
        "anchor": group[:, None] * 100 + turn.clamp(min=0),
        "task": group,
        "source": torch.zeros_like(group),
        "duration": noise().abs(),
        "budget": torch.randint(4, 9, (rows,), generator=g),
        "turn_reward": noise(),
        "information_gain": noise(),
        "greedy_reward": noise()[:, 0],
        "collision": torch.rand(rows, width, generator=g, dtype=torch.float64),
        "code_start": torch.randint(-1, 3, (rows,), generator=g),
        "parent": torch.zeros_like(group),
        "shared": torch.zeros_like(group),
        "hinted": torch.randint(0, 2, (rows, width), generator=g).double(),
    }


def widened(rollouts, width):
    """The rollouts with `width` decisions per row; added ones are padding."""
    missing = width - rollouts.num_decisions

    def pad(value, fill=0):
        return value if value.dim() == 1 else torch.nn.functional.pad(value, (0, missing), value=fill)

    fields = {name: value for name, value in vars(rollouts).items() if isinstance(value, torch.Tensor)}
    wide = {name: pad(value, -1 if name == "turn" else 0) for name, value in fields.items()}
    return rollouts.replace(**wide, extras={name: pad(value) for name, value in rollouts.extras.items()})


@dataclass
class Rows(Payload):
    """A payload that stores prompts once per group and one id per row."""

    prompts: list = per_group()
    ids: torch.Tensor = per_row()
