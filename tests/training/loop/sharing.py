"""The toy recipe with a bias that all rows share, computed once for the micro-batches of a batch."""

from contextlib import contextmanager

import torch

from mmrl.training.recipe import Recipe
from tests.training.toy import ToyPolicy, ToyRecipe


class SharedBias:
    def __init__(self, bias: torch.Tensor) -> None:
        self.bias = bias
        self.leaf = bias.detach().requires_grad_()

    def backward(self) -> None:
        self.bias.backward(self.leaf.grad)


class SharingPolicy(ToyPolicy):
    work: SharedBias | None = None
    computed = 0

    @property
    def prefixes(self):
        return self

    @contextmanager
    def open(self):
        self.work = SharedBias(self.bias())
        try:
            yield self.work
        finally:
            self.work = None

    def bias(self):
        if self.work is not None:
            return self.work.leaf
        self.computed += 1
        return 1.0 + torch.sin(self.shared)


class SharingRecipe(ToyRecipe):
    loss = Recipe.loss  # nothing beside the objective's
    own_loss = ""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.policy = SharingPolicy(6)
