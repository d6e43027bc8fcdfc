"""Soft actor-critic and what is built on it: Stable-Baselines3, torch, TorchRL, REDQ and RLPD on the same numbers."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import torch
from torch import Tensor, nn

from tests.golden.make.peers import Clone, Made, doubles, gradient, numbers, package, tensors

ROWS, CRITICS, GAMMA, TAU, ALPHA, TARGET = 4, 2, 0.97, 0.005, 0.2, -2.0
ENDS = ["running", "terminated", "truncated", "both"]
REDQ_COMMIT = "7b5d1bff39291a57325a2836bd397a55728960bb"
RLPD_COMMIT = "c90fd4baf28c9c9ef40a81460a2e395092844f88"


def make(redq: str, rlpd: str) -> Made:
    clones = Clone(redq, "watchernyu/REDQ", REDQ_COMMIT), Clone(rlpd, "ikostrikov/rlpd", RLPD_COMMIT)
    inputs: dict[str, Any] = {
        "gamma": GAMMA,
        "tau": TAU,
        "alpha": ALPHA,
        "target_entropy": TARGET,
        "ends": ENDS,
        "rewards": numbers(0, ROWS),
        "q": numbers(1, CRITICS, ROWS),
        "next_q": numbers(2, CRITICS, ROWS),
        "actor_q": numbers(3, CRITICS, ROWS),
        "logp": numbers(4, ROWS, low=-3.0),
        "next_logp": numbers(5, ROWS, low=-3.0),
        "many_q": numbers(6, 10, ROWS),
        # the last two rows are far in the tails of tanh
        "mean": [[0.3, -0.2], [-1.1, 0.8], [0.0, 0.0], [8.0, -12.0], [-20.0, 3.0]],
        "log_std": [[-0.5, 0.1], [-2.0, -1.0], [0.0, 2.0], [0.0, 0.0], [0.0, -1.0]],
        "noise": numbers(7, 5, 2, low=-2.0, high=2.0),
        "window_rewards": numbers(8, 7),
        "window": 3,
        "weights": numbers(9, 5),
        "weights_target": numbers(10, 5),
        "sizes": [256, 7, 6],
        "prior": [0.5, 0.5, 0.25],
    }
    with doubles():
        peers = [*densities(inputs), train(inputs), windows(inputs), polyak(inputs), ensemble(clones[0], inputs)]
    return "SAC, arXiv 1801.01290 and 1812.05905", inputs, [*peers, halves(clones[1], inputs)], *clones


def densities(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Log-density of tanh(mean + std noise); that of Stable-Baselines3 adds 1e-6 to the slope."""
    from stable_baselines3.common.distributions import SquashedDiagGaussianDistribution
    from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution
    from torchrl.modules import TanhNormal

    b = tensors(inputs)
    before = b.mean + b.log_std.exp() * b.noise
    normal = Independent(Normal(b.mean, b.log_std.exp()), 1)
    exact = TransformedDistribution(normal, [TanhTransform(cache_size=1)])
    # the cache gives back the number before the tanh, as sampling does
    (transform,) = exact.transforms
    logp = exact.log_prob(transform(before))
    theirs = SquashedDiagGaussianDistribution(2).proba_distribution(b.mean, b.log_std)
    rl = TanhNormal(b.mean[:3], b.log_std[:3].exp(), event_dims=1, safe_tanh=False)
    return [
        _peer(package("torch"), ["torch.distributions.TanhTransform"], density=logp),
        _peer(package("torchrl"), ["TanhNormal.log_prob"], because="it inverts tanh", relative=1e-9)
        | {"density": rl.log_prob(before[:3].tanh())},
        _peer(package("stable_baselines3"), ["SquashedDiagGaussianDistribution.log_prob"])
        | {"density_eps": theirs.log_prob(before.tanh(), before)},
    ]


def train(inputs: dict[str, Any]) -> dict[str, Any]:
    """One step of `SAC.train` whose networks give the numbers of the inputs."""
    from stable_baselines3.common.buffers import ReplayBuffer
    from stable_baselines3.sac.sac import SAC

    b = tensors(inputs)
    q, actor_q = b.q.clone().requires_grad_(), b.actor_q.clone().requires_grad_()
    logp = b.logp.clone().requires_grad_()
    log_alpha = torch.tensor([np.log(ALPHA)], requires_grad=True)
    space = _box(1)
    buffer = ReplayBuffer(ROWS, space, space)
    for row, end in enumerate(ENDS):
        done = end != "running"
        # as `DummyVecEnv` sets it
        info = {"TimeLimit.truncated": end == "truncated"}
        zero = np.zeros((1, 1))
        buffer.add(zero, zero, zero, np.array([inputs["rewards"][row]]), np.array([done]), [info])
    data = buffer._get_samples(np.arange(ROWS))
    data = data._replace(rewards=b.rewards[:, None], dones=data.dones.double())
    seen, grads = {}, {}

    def critic(_: Any, actions: Any) -> Any:
        return tuple((actor_q if actions == "drawn" else q)[:, :, None])

    # gradients are taken when the optimisers step, before anything is zeroed
    def steps(name: str, leaf: Tensor) -> Mock:
        found = Mock()
        found.step = lambda: grads.setdefault(name, leaf.grad.clone())
        return found

    learned = torch.optim.Adam([log_alpha], lr=3e-4)
    draws = iter([("drawn", logp), ("next", b.next_logp)])
    critics = Mock(side_effect=critic, optimizer=steps("q", q))
    critics.parameters = list
    self = SimpleNamespace(
        policy=Mock(),
        actor=Mock(action_log_prob=lambda _: next(draws), optimizer=steps("actor_q", actor_q)),
        critic=critics,
        critic_target=Mock(side_effect=lambda *_: tuple(b.next_q[:, :, None]), parameters=list),
        ent_coef_optimizer=learned,
        log_ent_coef=log_alpha,
        target_entropy=TARGET,
        replay_buffer=SimpleNamespace(sample=lambda *_, **__: data),
        logger=Mock(record=lambda name, value, **_: seen.setdefault(name, value)),
        _update_learning_rate=lambda _: None,
        _vec_normalize_env=None,
        gamma=GAMMA,
        tau=TAU,
        use_sde=False,
        target_update_interval=1,
        batch_norm_stats=[],
        batch_norm_stats_target=[],
        _n_updates=0,
    )
    data = data._replace(actions="given")
    SAC.train(self, 1, ROWS)
    return _peer(package("stable_baselines3"), ["ReplayBuffer", "SAC.train"]) | {
        "critic_loss": seen["train/critic_loss"],
        "actor_loss": seen["train/actor_loss"],
        "temperature_loss": seen["train/ent_coef_loss"],
        "q_gradient": grads["q"],
        "actor_q_gradient": grads["actor_q"],
        "logp_gradient": logp.grad,
        "log_alpha": log_alpha.detach(),
    }


def windows(inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns, discounts and ends of windows: an episode of 4 steps that a limit cuts, and one of 3 that ends."""
    from stable_baselines3.common.buffers import NStepReplayBuffer

    rewards, size = inputs["window_rewards"], inputs["window"]
    buffer = NStepReplayBuffer(len(rewards), _box(1), _box(1), n_steps=size, gamma=GAMMA)
    for step, reward in enumerate(rewards):
        info = {"TimeLimit.truncated": step == 3}
        zero = np.zeros((1, 1))
        buffer.add(zero, zero, zero, np.array([reward]), np.array([step in (3, 6)]), [info])
    buffer.pos, buffer.full = 0, True
    found = buffer._get_samples(np.arange(len(rewards)))
    peer = _peer(package("stable_baselines3"), ["NStepReplayBuffer"], because="it is float32", relative=1e-6)
    return peer | {
        "window_return": found.rewards.ravel(),
        "window_discount": found.discounts.ravel(),
        "window_done": found.dones.ravel(),
    }


def polyak(inputs: dict[str, Any]) -> dict[str, Any]:
    from stable_baselines3.common.utils import polyak_update

    b = tensors(inputs)
    polyak_update([b.weights], [b.weights_target], TAU)
    return _peer(package("stable_baselines3"), ["polyak_update"], moved=b.weights_target)


def ensemble(clone: Clone, inputs: dict[str, Any]) -> dict[str, Any]:
    """Target with a subset of critics, and the loss of the actor with the mean of all."""
    file = "redq/algos/redq_sac.py"
    number = clone.function(file, "get_probabilistic_num_min")
    agent = clone.function(file, "REDQSACAgent", get_probabilistic_num_min=number, nn=nn, Tensor=Tensor)
    b = tensors(inputs)
    np.random.seed(0)
    networks = [lambda _, values=values: values[:, None] for values in b.many_q]
    policy = SimpleNamespace(forward=lambda obs: (obs, None, None, b.next_logp[:, None], None, None))
    self = SimpleNamespace(
        num_min=2,
        num_Q=10,
        q_target_mode="min",
        policy_net=policy,
        q_target_net_list=networks,
        alpha=ALPHA,
        gamma=GAMMA,
    )
    done = torch.tensor([[0.0], [1.0], [0.0], [1.0]], dtype=torch.float64)
    targets, subset = agent.get_redq_q_target_no_grad(self, torch.zeros(ROWS, 1), b.rewards[:, None], done)
    many = b.many_q.clone().requires_grad_()
    logp = b.logp[:, None]
    # two lines of `train`
    found = clone.lines(file, 223, 224, q_a_tilda_cat=many.T, log_prob_a_tilda=logp, self=self)
    peer = _peer(clone.name, [f"{file}:get_redq_q_target_no_grad", f"{file}:train, 223-224"])
    return peer | {
        "subset": subset,
        "subset_targets": targets.ravel(),
        "mean_actor_loss": found.policy_loss.detach(),
        "mean_actor_gradient": gradient(found.policy_loss, many),
    }


def halves(clone: Clone, inputs: dict[str, Any]) -> dict[str, Any]:
    """Rows of prior data in each slice of a batch for two updates."""
    combine = clone.function("train_finetuning.py", "combine")
    counts = []
    for size, ratio in zip(inputs["sizes"], inputs["prior"], strict=True):
        # lines 184 and 187
        online, offline = int(size * 2 * (1 - ratio)), int(size * 2 * ratio)
        if online != offline:
            continue  # it interleaves halves alone
        rows = combine({"prior": np.ones(offline)}, {"prior": np.zeros(online)})["prior"]
        counts.append([float(part.sum()) for part in np.split(rows, 2)])
    return _peer(clone.name, ["train_finetuning.py:combine"]) | {"prior_rows": counts}


def _box(size: int) -> Any:
    from gymnasium.spaces import Box

    return Box(-1, 1, (size,))


def _peer(program: str, calls: list[str], relative: float = 1e-12, **found: Any) -> dict[str, Any]:
    return {"program": program, "calls": calls, "relative": relative, **found}
