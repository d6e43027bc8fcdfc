"""VL-DAC by its public code: returns of the storage, and a whole update of the agent with gradients added up."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.utils.data.sampler import BatchSampler, SubsetRandomSampler

from tests.golden.make.peers import Clone, Made, numbers

COMMIT = "5da27838c5735b565aa55b1d312654e6da9e130c"
CONSTANTS = {"clip_param": 0.1, "value_loss_coef": 0.5, "kl_beta": 0.04, "gamma": 0.9, "gae_lambda": 0.95}
"""Constants of configs/miniworld_qwen2vl.yaml."""
ROW = {"clip_param": 0.1, "value_loss_coef": 0.15, "kl_beta": 0.05, "gamma": 0.99, "gae_lambda": 0.95}
"""Constants of the paper's appendix."""
TOKENS = [[2, 4, 3], [5, 1], [3, 2, 4]]
"""Tokens of each turn of three episodes; the second one ends by a time limit, the third one is cut off in one case."""


def make(path: str) -> Made:
    clone = Clone(path, "corl-team/VL-DAC", COMMIT)
    torch.set_default_dtype(torch.float64)  # the storage makes its tensors with the default type
    inputs = make_inputs()
    peers = [run(clone, inputs, cut_off=False) | {"case": "time limit"}]
    peers.append(run(clone, inputs, cut_off=True) | {"case": "cut off"})
    peers.append(run(clone, inputs, cut_off=False, warmup=True) | {"case": "warm-up"})
    # a ratio between the limit of 10 and 11
    near = {"logp": [round(x - 0.15 * (place == 16), 3) for place, x in enumerate(inputs["logp"])]}
    peers.append({"inputs": near} | run(clone, inputs | near, cut_off=False, constants=ROW) | {"case": "row"})
    return "VL-DAC, arXiv 2508.04280", inputs, peers, clone


def make_inputs() -> dict:
    """Turns one after another; ratios on both sides of the bounds, and beyond 10 in a turn worse than expected."""
    steps, tokens = sum(map(len, TOKENS)), sum(map(sum, TOKENS))
    old, moves = numbers(1, tokens, low=-3.5, high=-0.4), numbers(2, tokens, low=-0.3, high=0.3)
    moves[16] = 2.5
    return {
        "tokens": [count for episode in TOKENS for count in episode],
        "episode": [number for number, episode in enumerate(TOKENS) for _ in episode],
        "reward": [0.0, 0.1, 1.0, 0.0, 0.3, -0.2, 0.0, 0.5],
        "truncated": [0.0, 1.0, 0.0],
        "next_value": 0.7,
        "values": numbers(3, steps, low=-0.4, high=0.9),
        "values_new": numbers(4, steps, low=-0.4, high=0.9),
        "logp_old": old,
        "logp": [round(a + b, 3) for a, b in zip(old, moves, strict=True)],
        "logp_ref": numbers(5, tokens, low=-3.5, high=-0.4),
    }


def run(clone: Clone, inputs: dict, *, cut_off: bool, warmup: bool = False, constants: dict = CONSTANTS) -> dict:
    """Fill the storage step by step, let it compute the returns, and update once over all steps."""
    rollouts = fill(clone, inputs, cut_off)
    rollouts.compute_returns(
        torch.tensor([[inputs["next_value"]]]), True, constants["gamma"], constants["gae_lambda"], True
    )
    logp, values = (torch.tensor(inputs[name], requires_grad=True) for name in ("logp", "values_new"))
    losses: list[Tensor] = []
    agent = make_agent(clone, logp, values, inputs["tokens"], losses, constants)
    agent.update(rollouts, only_value_loss=warmup, kl=True)
    loss = torch.stack(losses).mean()  # accelerate divides by the number of steps that it adds up
    slopes = torch.autograd.grad(loss, [logp, values], materialize_grads=True)
    return {
        "program": clone.name,
        "calls": ["a2c_ppo_acktr/storage.py:RolloutStorage", "a2c_ppo_acktr/algo/ppo.py:PPO.update"],
        "relative": 1e-12,
        "returns": rollouts.returns[:-1].flatten(),
        "loss": loss.detach(),
        "gradient": slopes[0],
        "gradient_values": slopes[1],
    }


def fill(clone: Clone, inputs: dict, cut_off: bool):
    names = {"copy": copy, "BatchSampler": BatchSampler, "SubsetRandomSampler": SubsetRandomSampler}
    storage = clone.function("a2c_ppo_acktr/storage.py", "RolloutStorage", **names)
    space = type("Discrete", (), {})()
    steps = len(inputs["tokens"])
    rollouts = storage(steps, 1, space, 8)
    episode, start = inputs["episode"], 0
    rollouts.obs[0] = {"step": 0}
    for step, count in enumerate(inputs["tokens"]):
        last = step + 1 == steps or episode[step + 1] != episode[step]
        done = last and not (cut_off and step + 1 == steps)
        limit = last and inputs["truncated"][episode[step]] > 0 and not cut_off
        own = slice(start, start + count)
        old, ref = (torch.tensor(inputs[name][own]) for name in ("logp_old", "logp_ref"))
        value, reward = torch.tensor([[inputs["values"][step]]]), torch.tensor([inputs["reward"][step]])
        masks = torch.tensor([[float(not done)]]), torch.tensor([[float(not limit)]])
        rollouts.insert({"step": step + 1}, own, torch.tensor([0]), old, ref, value, reward, *masks)
        start += count
    return rollouts


def make_agent(clone: Clone, logp: Tensor, values: Tensor, tokens: list[int], losses: list[Tensor], constants: dict):
    """The agent, with leaf tensors instead of a model and a list instead of accumulated gradients."""
    quiet = {"tqdm": lambda x, **_: x, "print": lambda *_: None, "nn": nn}
    ppo = clone.function("a2c_ppo_acktr/algo/ppo.py", "PPO", **quiet)
    model = SimpleNamespace(
        train=lambda: None,
        evaluate_actions=lambda observation, own: (values[observation["step"]].view(1, 1), logp[own]),
        parameters=lambda: [],
    )
    nothing = SimpleNamespace(step=lambda: None, zero_grad=lambda: None)
    accelerator = SimpleNamespace(accumulate=lambda _: nullcontext(), backward=losses.append, sync_gradients=False)
    own = {name: constants[name] for name in ("clip_param", "value_loss_coef", "kl_beta")}
    return ppo(model, nothing, accelerator, ppo_epoch=1, mini_batch_size=1, entropy_coef=0.01, **own)
