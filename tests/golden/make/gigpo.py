"""GiGPO by its authors' code: advantages of turns, and the loss of their actor."""

import uuid
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from tests.golden.make.peers import Clone, Made, gradient, numbers, tensors
from tests.golden.make.tokens import batch, far_reference

REPOSITORY, COMMIT = "langfengQ/DrMAS", "1bc15d2e5756feab090fc3ba015f285dab9ee166"
GIGPO, CORE, MASKED = "gigpo/core_gigpo.py", "verl/trainer/ppo/core_algos.py", "verl/utils/torch_functional.py"
GAMMA, WEIGHT = 0.95, 1.0


def make(path: str) -> Made:
    clone = Clone(path, REPOSITORY, COMMIT)
    torch.set_default_dtype(torch.float64)  # it makes tensors of lists
    inputs = make_inputs()
    peers = [
        run(clone, inputs, "mean_norm", over_turns=True) | {"changes": {}},
        run(clone, inputs, "mean_std_norm", over_turns=True) | {"changes": {"advantage": {"std": True}}},
        run(clone, inputs, "mean_std_norm", over_turns=False)
        | {"changes": {"advantage": {"std": True, "episode_mean": "episodes"}}},
    ]
    reference = far_reference(inputs)
    peers.append({"inputs": reference} | run(clone, inputs | reference, "mean_norm", over_turns=True))
    return "GiGPO, arXiv 2505.10978", inputs, peers, clone


def make_inputs() -> dict:
    """Two tokens a turn, some of them observations; states that recur in a group, in an episode and across groups."""
    inputs = batch()
    mask = inputs["mask"]
    mask[0][2] = mask[3][2] = mask[5][4] = 0.0
    reward, anchor = numbers(6, 12, 3), np.random.RandomState(7).randint(0, 3, (12, 3)).tolist()
    reward[4:8] = [[0.5, 0.0, 0.25]] * 4
    received = np.zeros((12, 6))
    for row, turn, trained in turns_of(mask):
        received[row, trained[-1]] = reward[row][turn]
    inputs |= {"reward": received.sum(1).tolist(), "turn": [[0, 0, 1, 1, 2, 2]] * 12}
    extras = {"anchor": [[a[0], a[0], a[1], a[1], a[2], a[2]] for a in anchor], "decision_reward": received.tolist()}
    return inputs | {"extras": extras}


def turns_of(mask: list) -> list[tuple[int, int, list[int]]]:
    """Row, number and trained tokens of each turn that has one."""
    places = [(row, turn, (2 * turn, 2 * turn + 1)) for row in range(12) for turn in range(3)]
    found = [(row, turn, [t for t in own if mask[row][t]]) for row, turn, own in places]
    return [entry for entry in found if entry[2]]


def run(clone: Clone, inputs: dict, mode: str, *, over_turns: bool) -> dict:
    """Rows of single turns, as the code has them; `over_turns` is its compute_mean_std_cross_steps."""
    b, turns = tensors(inputs), turns_of(inputs["mask"])
    b.logp.requires_grad_()
    row = np.array([row for row, _, _ in turns])
    group, received = np.array(inputs["group"])[row], np.array(inputs["extras"]["decision_reward"])
    own = torch.zeros(len(turns), 6)
    for number, (_, _, trained) in enumerate(turns):
        own[number, trained] = 1.0
    rewards = torch.zeros_like(own)
    rewards[:, 0] = b.reward[row]
    columns = {
        "rewards": np.array([received[row, trained].sum() for row, _, trained in turns]),
        "traj_uid": row,
        "active_masks": np.ones(len(turns)),
        "env_step": np.array([turn for _, turn, _ in turns]),
    }
    given = SimpleNamespace(non_tensor_batch=columns, batch={"input_ids": own})
    names = {
        "np": SimpleNamespace(**{**vars(np), "float32": np.float64}),
        "torch": SimpleNamespace(**{**vars(torch), "float32": torch.float64}),
        "defaultdict": defaultdict,
        "uuid": uuid,
        "print": lambda *_: None,
    }
    steps = clone.function(GIGPO, "compute_step_discounted_returns", **names)(given, GAMMA)
    episodes = clone.function(GIGPO, "episode_norm_reward", **names)
    names |= {
        "to_hashable": clone.function(GIGPO, "to_hashable", **names),
        "episode_norm_reward": partial(episodes, compute_mean_std_cross_steps=over_turns),
        "step_norm_reward": clone.function(GIGPO, "step_norm_reward", **names),
    }
    names["build_step_group"] = clone.function(GIGPO, "build_step_group", **names)
    whole = clone.function(GIGPO, "compute_gigpo_outcome_advantage", **names)
    anchor = np.array([inputs["extras"]["anchor"][row][2 * turn] for row, turn, _ in turns])
    scores = whole(rewards, steps, own, anchor, group, row, step_advantage_w=WEIGHT, mode=mode)[0]
    advantage = torch.zeros_like(b.mask).index_add_(0, torch.from_numpy(row), scores)
    loss = actor_loss(clone, b, advantage)
    return {
        "program": clone.name,
        "calls": [f"{GIGPO}:compute_gigpo_outcome_advantage", f"{CORE}:compute_policy_loss"],
        "relative": 1e-8,
        "because": "its mean adds 1e-8 to the number of tokens",
        "advantage": advantage,
        "loss": loss.detach(),
        "gradient": gradient(loss, b.logp),
    }


def actor_loss(clone: Clone, b: SimpleNamespace, advantage: torch.Tensor) -> torch.Tensor:
    """Loss of verl/workers/actor/dp_actor.py with the settings of examples/gigpo_trainer."""
    masked_sum = clone.function(MASKED, "masked_sum")
    verl_f = SimpleNamespace(masked_mean=clone.function(MASKED, "masked_mean", masked_sum=masked_sum))
    agg_loss = clone.function(CORE, "agg_loss", verl_F=verl_f)
    policy_loss = clone.function(CORE, "compute_policy_loss", verl_F=verl_f, agg_loss=agg_loss)
    divergence = clone.function(CORE, "kl_penalty")(b.logp, b.logp_ref, "low_var_kl")
    policy = policy_loss(b.logp_old, b.logp, advantage, b.mask, cliprange=0.2, clip_ratio_c=3.0)[0]
    return policy + 0.01 * agg_loss(divergence, b.mask, "token-mean")
