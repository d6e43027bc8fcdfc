"""The language model's head: from states to log-probabilities."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmrl.core.logprobs import CHUNK_ELEMENTS, LogProbs, linear_logprobs, logprobs_from_logits

LARGE = 100.0
"""Size of the logits at which a head is compared with its matrix; capped or scaled ones are other numbers there."""


class Head:
    """The head of a transformers model, including what the model does to its logits, such as a soft cap.

    Args:
        network: the model.
    """

    def __init__(self, network: Any) -> None:
        self._network = network
        self.plain = _is_plain(network)
        """Whether the logits are the product of states and output embedding."""

    @property
    def _layer(self) -> Any:
        return self._network.get_output_embeddings()

    @property
    def entries(self) -> int:
        """Width V of the logits, which may exceed the tokens of the tokenizer."""
        return int(self._layer.weight.shape[0])

    def logits(self, states: Tensor) -> Tensor:
        """Logits (M, V) of states (M, H)."""
        with torch.autocast(device_type=states.device.type, enabled=False):
            if not self.plain:
                return own_logits(self._network, states)
            weight, bias = self._layer.weight, self._layer.bias
            return nn.functional.linear(
                states, weight.to(states.dtype), None if bias is None else bias.to(states.dtype)
            )

    def logprobs(
        self, states: Tensor, targets: Tensor, *, temperature: float, banned: Tensor, entropy: bool
    ) -> LogProbs:
        """Log-probabilities (M,) of the targets (M,) and, if asked for, entropies; never more than a chunk of logits.

        Gradient: through states and the head's weights.
        """
        if self.plain:
            layer = self._layer
            return linear_logprobs(
                states, layer.weight, targets, bias=layer.bias, temperature=temperature, banned=banned, entropy=entropy
            )

        def score(part: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor | None]:
            found = logprobs_from_logits(
                self.logits(part), chosen, temperature=temperature, banned=banned, entropy=entropy
            )
            return found.logp, found.entropy

        rows = max(1, CHUNK_ELEMENTS // self.entries)
        pairs = zip(states.split(rows), targets.split(rows), strict=True)
        scores = [checkpoint(score, *pair, use_reentrant=False) for pair in pairs]  # type: ignore[no-untyped-call]
        logp = torch.cat([logp for logp, _ in scores])
        return LogProbs(logp, torch.cat([found for _, found in scores]) if entropy else None)

    def several(self, states: Tensor, ids: Tensor, *, temperature: float, banned: Tensor) -> Tensor:
        """Log-probabilities (M, K) of K tokens `ids` (M, K) at each of M states; keeps no logits.

        Gradient: through states and the head's weights.
        """

        def score(part: Tensor, chosen: Tensor) -> Tensor:
            logits = self.logits(part).float() / temperature
            return logits.index_fill(1, banned, float("-inf")).log_softmax(-1).gather(1, chosen)

        rows = max(1, CHUNK_ELEMENTS // self.entries)
        pairs = zip(states.split(rows), ids.split(rows), strict=True)
        return torch.cat([checkpoint(score, *pair, use_reentrant=False) for pair in pairs])  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def collision(self, states: Tensor, targets: Tensor, logp: Tensor, temperature: float, banned: Tensor) -> Tensor:
        """Sum (M,) of the squared probabilities, given the targets' log-probabilities (M,).

        The softmax at half the temperature is p^2 / sum p^2, so one entry of both gives the sum.
        """
        halved = self.logprobs(states, targets, temperature=temperature / 2, banned=banned, entropy=False).logp
        return (2 * logp - halved).exp()


class _Given:
    """Minimal output of a model body: only the last states."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def own_logits(network: Any, states: Tensor) -> Tensor:
    """Logits (M, V) that a model's `forward` makes of states (M, H), without its body."""
    body, layer = network.base_model, network.get_output_embeddings()
    given = _Given(states[None].to(layer.weight.dtype))
    own = vars(body).get("forward")  # accelerate puts one there
    body.forward = lambda *_, **__: given
    try:
        nothing = torch.zeros((1, len(states)), dtype=torch.int64, device=states.device)
        return network(input_ids=nothing, use_cache=False).logits[0]  # type: ignore[no-any-return]
    finally:
        if own is None:
            del body.forward
        else:
            body.forward = own


def _is_plain(network: Any) -> bool:
    """Whether the logits are the product of states and output embedding, tested on two states."""
    layer = network.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        return False
    with torch.no_grad():
        draw = torch.Generator().manual_seed(0)
        states = torch.randn(2, layer.in_features, generator=draw).to(layer.weight)
        states = states * (LARGE / layer(states).abs().max().clamp(min=1e-6))
        return torch.allclose(own_logits(network, states).float(), layer(states).float(), rtol=1e-2, atol=1e-2)
