"""How the routers of a mixture of experts distribute tokens over the experts, in each layer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.errors import UserError
from mmrl.vlm.engine.rows import Reading


class Routes:
    """Sums of the router decisions of a network over tokens and layers; inactive unless `wanted`.

    Sums are (..., 2, E): how often each of E experts is chosen, and the sum of its probabilities, which has a gradient.
    """

    def __init__(self, network: Any, *, wanted: bool) -> None:
        self._routers = _find_routers(network) if wanted else []
        self.top_k = int(getattr(network.config.get_text_config(), "num_experts_per_tok", 0))
        """Experts that a token is sent to in a layer."""
        self._seen: list[Tensor] = []
        self._parts: list[Tensor] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note what the routers decide about the tokens of one pass."""
        self._seen = []
        with ExitStack() as hooks:
            for router, place in self._routers:
                hook = router.register_forward_hook(
                    lambda _, __, output, place=place: self._seen.append(output[place] if place is not None else output)
                )
                hooks.callback(hook.remove)
            yield

    def sums(self, owner: Tensor, count: int) -> Tensor | None:
        """Sums (count, 2, E) of the pass just watched; `owner` (M,) int64 of each token, -1 for padding."""
        if not self._routers:
            return None
        seen, self._seen = self._seen, []
        real = owner >= 0
        found = []
        for logits in seen:  # as `load_balancing_loss_func` of transformers
            probability = logits.reshape(len(owner), -1)[real].softmax(-1)
            chosen = torch.zeros_like(probability).scatter(1, probability.topk(self.top_k, -1).indices, 1.0)
            found.append(torch.stack([chosen, probability], 1).to(torch.promote_types(logits.dtype, torch.float32)))
        tokens = torch.stack(found).sum(0)
        return tokens.new_zeros(count, *tokens.shape[1:]).index_add(0, owner[real], tokens)

    def add(self, real: Tensor) -> None:
        """Count the tokens of the last watched pass for which `real` (M,) is True."""
        if (found := self.sums(real.long() - 1, 1)) is not None:
            self._parts.append(found[0])

    def add_rows(self, hidden: Tensor, before: Tensor, reading: Reading) -> None:
        """Count rows just watched, of states (R, L, H) and prompts of `before` (R,) tokens, where tokens are scored."""
        scored = torch.zeros(len(before), dtype=torch.bool, device=before.device)
        scored[reading.row] = True
        ends = (before + reading.lengths)[:, None]
        self.add(((torch.arange(hidden.shape[1], device=before.device) < ends) & scored[:, None]).flatten())

    def add_prompts(self, found: Tensor | None, reading: Reading) -> None:
        """Count prompts with sums (N, 2, E) once per row that uses them, as if every row had its own prompt."""
        if found is not None:
            rows = torch.bincount(reading.group[reading.row.unique()], minlength=len(found))
            self._parts.append(torch.tensordot(rows.to(found.dtype), found, 1))

    def take(self) -> Tensor | None:
        """Sums (2, E) of all counts since the last call; None if nothing was counted."""
        parts, self._parts = self._parts, []
        return torch.stack(parts).sum(0) if parts else None


def _find_routers(network: Any) -> list[tuple[nn.Module, int | None]]:
    """Routers of the decoder layers, and the place of their logits in what they return; raises UserError."""
    recorders = [getattr(module, "_can_record_outputs", None) or {} for module in network.modules()]
    wanted = [recorder["router_logits"] for recorder in recorders if "router_logits" in recorder]
    places = {getattr(one, "target_class", one): getattr(one, "index", None) for one in wanted}
    found = [(module, places[type(module)]) for module in network.modules() if type(module) in places]
    if not found or not hasattr(sys.modules[type(network).__module__], "load_balancing_loss_func"):
        raise UserError(
            "model.router_aux_loss_coef is above 0, but transformers has no load-balancing loss for models of type "
            f"{network.config.model_type}: it is for mixtures of experts such as qwen3_moe and qwen3_vl_moe"
        )
    return found
