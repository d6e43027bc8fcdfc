"""A run gives the user's program, and the models that it has loaded, back as they were, except for what it trains."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any


@contextmanager
def undisturbed(modules: Sequence[Any], *, trains: bool = False) -> Iterator[None]:
    """Restore the program's state and the settings of its modules at the end, also of a run that fails."""
    with ExitStack() as stack:
        for restore in _global_state():
            stack.callback(restore)
        for lent in [Lent(module) for module in modules]:
            stack.callback(lent.give_back, trained=trains)
        yield


def _global_state() -> Iterator[Callable[[], object]]:
    """Functions that restore random numbers, threads, variables, and what accelerate keeps of a process."""
    yield partial(random.setstate, random.getstate())  # first: an import may draw
    import numpy as np
    import torch
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from mmrl.training.processes import CACHE_CAPACITY

    yield partial(np.random.set_state, np.random.get_state())
    yield partial(torch.set_rng_state, torch.get_rng_state())
    if torch.cuda.is_initialized():
        yield partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    yield partial(torch.set_num_threads, torch.get_num_threads())
    if CACHE_CAPACITY not in os.environ:
        yield partial(os.environ.pop, CACHE_CAPACITY, None)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:  # else the states hold the connection of the processes
        for kind in (AcceleratorState, GradientState, PartialState):
            # the program's own Accelerator reads its precision there, and a later one may not have another
            yield partial(_refill, kind._shared_state, dict(kind._shared_state))


def _refill(state: dict[str, Any], before: dict[str, Any]) -> None:
    state.clear()
    state.update(before)


class Lent:
    """Settings of a loaded torch module before a run.

    Args:
        module: the module, or a part of a pipeline.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        parts = list(module.modules())
        self._modes = [(part, part.training) for part in parts]
        self._frozen = [(weight, weight.requires_grad) for weight in module.parameters()]
        self._values = [(part, name, value) for part in parts for name, value in _switched(part).items()]
        configs = {id(part.config): part.config for part in parts if hasattr(part, "config")}
        # of outer configurations first, whose kind is that of inner ones too when it is set
        self._attention = [(each, kind) for each in configs.values() if (kind := _attention(each)) is not None]
        self._generation = getattr(module, "generation_config", None)
        self._hooked = bool(getattr(module, "_require_grads_hooks", ()))

    def give_back(self, *, trained: bool) -> None:
        """Restore the settings.

        A trained model keeps the generation settings that it was trained with, such as the tokens that end a response.
        With adapters its own weights stay frozen.
        """
        self.module.train(self._modes[0][1])  # also adapters, which were not there before
        for part, training in self._modes:
            part.training = training
        for part, name, value in self._values:
            if getattr(part, name) != value:
                setattr(part, name, value)
        if getattr(self.module, "_require_grads_hooks", ()) and not self._hooked:
            self.module.disable_input_require_grads()  # a part of gradient checkpointing
        for config, kind in self._attention:
            config._attn_implementation = kind
        if self._generation is not None and not trained:
            self.module.generation_config = self._generation
        if not getattr(self.module, "peft_config", None):
            for weight, trains in self._frozen:
                weight.requires_grad_(trains)


def _switched(part: Any) -> dict[str, Any]:
    """Attributes of a layer that training changes: its dropout, and whether it recomputes activations."""
    rates = {name: value for name, value in vars(part).items() if "drop" in name and isinstance(value, float)}
    if type(part).__name__.startswith("Dropout"):
        rates["p"] = part.p
    if hasattr(part, "gradient_checkpointing"):
        rates["gradient_checkpointing"] = part.gradient_checkpointing
    return rates


def _attention(config: Any) -> str | None:
    """Kind of attention of a transformers model; None for other configurations, or if none is chosen yet."""
    return getattr(config, "_attn_implementation", None) if hasattr(config, "get_text_config") else None
