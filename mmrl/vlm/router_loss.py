"""The load-balancing loss of mixtures of experts (Switch Transformer, arXiv 2101.03961, equations 4 to 6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.loss import Denominators, Metric, PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.runs.run_log import stopwatch
from mmrl.training.recipe import LossTerm, Recipe, Step, TermLoss, shared_prefix


def router_terms(recipe: Any) -> list[LossTerm]:
    """The loss term of `model.router_aux_loss_coef`; empty if that is 0."""
    coef = recipe.config.model.router_aux_loss_coef
    return [RouterLoss(recipe, coef)] if coef else []


class RouterLoss(LossTerm):
    """coef * E * sum over E experts of f P, with the fraction f of tokens sent to an expert and its mean probability P.

    Shares and means are over layers and all tokens of the optimiser step that the model reads, in all processes: the
    prompt of each row and its response without the last token. Shares are counted before the update, in one more pass
    without gradient, so that micro-batches and shared prompts change nothing.
    """

    name = "router"
    outputs = frozenset({"routes"})

    def __init__(self, recipe: Recipe[Any, Any], coef: float) -> None:
        self._recipe = recipe
        self.coef = coef

    def counts(self, minibatch: Rollouts) -> Mapping[str, float]:
        """How often each expert is chosen."""
        recipe, policy = self._recipe, self._recipe.policy
        chunks = list(minibatch.micro_batches(recipe.config.trainer.micro_batch or minibatch.num_rows))
        with stopwatch("router"), torch.no_grad(), shared_prefix(policy, chunks):
            found = [_routes(recipe.scores(policy, chunk, self.outputs))[0] for chunk in chunks]
        return {f"{self.name}/{expert}": number for expert, number in enumerate(torch.stack(found).sum(0).tolist())}

    def __call__(
        self, policy: nn.Module, minibatch: Rollouts, scores: PolicyOutputs, counts: Denominators, step: Step
    ) -> TermLoss:
        """This micro-batch's fraction of the loss."""
        probability = _routes(scores)[1]
        experts = len(probability)
        chosen = probability.new_tensor([counts.others[f"{self.name}/{expert}"] for expert in range(experts)])
        total = chosen.sum() / self._recipe.policy.routes.top_k  # tokens of the step times layers
        loss = self.coef * experts * (chosen / total * (probability / total)).sum()
        busiest = experts * chosen.max() / chosen.sum()
        return TermLoss({"loss/router": loss}, {"router/busiest_max": Metric(busiest, 1.0, "max")})

    def formula(self) -> str:
        """The term with its weight."""
        return f"          + {self.coef:g} * E * sum over E experts of fraction of tokens * mean probability"


def _routes(scores: PolicyOutputs) -> Tensor:
    assert scores.routes is not None
    return scores.routes
