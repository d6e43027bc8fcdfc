"""PMOE: the actor's loss by an author's code, and the density of a mixture by torch."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import (
    Categorical,
    Independent,
    MixtureSameFamily,
    Normal,
    TanhTransform,
    TransformedDistribution,
)
from torch.nn import functional

from tests.golden.make.peers import Clone, Made, doubles, gradient, numbers, package, tensors

COMMIT = "3b814ea159f1fc0b521d6e0e699a7945f770f105"
FILE = "pmoe_sac.py"
ROWS, EXPERTS, STEPS, SIZE = 5, 3, 2, 2


def make(path: str) -> Made:
    clone = Clone(path, "quantumiracle/Popular-RL-Algorithms", COMMIT)
    inputs: dict[str, Any] = {
        "alpha": 0.2,
        "logits": numbers(0, ROWS, EXPERTS),
        "mean": numbers(1, ROWS, EXPERTS, STEPS, SIZE),
        "log_std": numbers(2, ROWS, EXPERTS, STEPS, SIZE),
        "noise": numbers(3, ROWS, EXPERTS, STEPS, SIZE, low=-1.5, high=1.5),
        # the critics are -|a - centre|^2
        "centres": numbers(4, 2, ROWS, STEPS, SIZE),
        "before": numbers(5, ROWS, STEPS, SIZE, low=-2, high=2),
    }
    with doubles():
        return "PMOE, arXiv 2104.09122", inputs, [actor(clone, inputs), density(inputs)], clone


def actor(clone: Clone, inputs: dict[str, Any]) -> dict[str, Any]:
    """The loss of the actor; a chunk is one action of all its numbers there."""
    b = tensors(inputs)
    leaves = [part.clone().requires_grad_() for part in (b.logits, b.mean, b.log_std)]
    noise = b.noise.flatten(2)

    class Fixed(Normal):
        def sample(self, shape: Any = ()) -> Tensor:
            return noise

    def critic(centre: Tensor) -> Any:
        return lambda state, actions, repeat: -(actions - centre.flatten(1)[:, None]).square().sum(-1)

    names = {"nn": nn, "F": functional, "Normal": Fixed, "device": "cpu"}
    policy = clone.function(FILE, "PolicyNetwork", **names)
    own = policy.__new__(policy)
    nn.Module.__init__(own)
    own.K, own.action_range = EXPERTS, 1.0
    own.forward = lambda state: (leaves[0].softmax(-1), *(leaf.flatten(2) for leaf in leaves[1:]))
    weights, actions, logp, *_ = own.evaluate(None, epsilon=0.0)
    nets = SimpleNamespace(
        soft_q_net1=critic(b.centres[0]), soft_q_net2=critic(b.centres[1]), policy_net=own, alpha=b.alpha
    )
    given = {"new_action": actions, "log_prob": logp, "new_mixing_coefficient": weights, "state": None}
    found = clone.lines(FILE, 281, 286, self=nets, F=functional, **given)
    return {
        "program": clone.name,
        "calls": [f"{FILE}:PolicyNetwork.evaluate", f"{FILE}:PMOE_Trainer.update (281 to 286)"],
        "relative": 1e-11,
        "because": "it computes 1 - tanh^2, in which numbers cancel",
        "value": found.predicted_new_q_value,
        "best": found.best_index,
        "logp": torch.gather(logp.squeeze(-1), 1, found.best_index[:, None]).squeeze(1),
        "frequency": found.mixing_coefficient_loss,
        "loss": found.policy_loss,
        **{f"gradient_{name}": gradient_of(found.policy_loss, leaf) for name, leaf in zip(NAMES, leaves, strict=True)},
    }


NAMES = ("logits", "mean", "log_std")


def gradient_of(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss, leaf, retain_graph=True)[0]


def density(inputs: dict[str, Any]) -> dict[str, Any]:
    """Log-density of the first t control steps of a chunk, for every t."""
    b = tensors(inputs)
    leaf = b.mean.clone().requires_grad_()
    found = []
    for steps in range(1, STEPS + 1):
        parts = leaf[:, :, :steps].flatten(2), b.log_std[:, :, :steps].exp().flatten(2)
        mixture = MixtureSameFamily(Categorical(logits=b.logits), Independent(Normal(*parts), 1))
        transform = TanhTransform(cache_size=1)
        # the cache gives back the number before the tanh
        actions = transform(b.before[:, :steps].flatten(1))
        found.append(TransformedDistribution(mixture, [transform]).log_prob(actions))
    return {
        "program": package("torch"),
        "calls": ["torch.distributions.MixtureSameFamily", "torch.distributions.TanhTransform"],
        "relative": 1e-12,
        "density": torch.stack(found, 1),
        "density_gradient": gradient(found[-1].sum(), leaf),
    }
