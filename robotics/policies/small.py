"""A small, fast vision-language-action policy: each number of an action chunk is a token; all are decoded in parallel.

Source: OpenVLA-OFT, arXiv 2502.19645 (parallel decoding of action chunks), with the likelihood of a language-model head
    instead of its L1 regression, as in Haozhan-Li/SimpleVLA-RL and sii-research/siiRL.

Differences: the observation encoder is `robotics.policies.base.encoder` with about half a million parameters; queries
attend to each other in both directions; by default there is one query per control step with a head for each of the D
numbers, which gives the same independent distributions with 1/D of the tokens (`queries="token"` uses one query per
number).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mmrl.fields import bounded, check_config, choice, rare
from robotics.policies.base.action_policy import PolicyInputs, TokenPolicy
from robotics.policies.base.action_tokens import TOKEN_MODES, ActionTokenizer
from robotics.policies.base.encoder import EncodedPolicy, EncoderConfig, ObservationEncoder, Vocabulary

QUERIES = ("step", "token")


@dataclass
class SmallVlaConfig:
    """Sizes and settings of the policy."""

    action_size: int = rare(bounded(at_least=1))
    """D, number of entries of an action."""
    chunk: int = rare(bounded(8, at_least=1))
    """K, control steps predicted at once."""
    bins: int = rare(bounded(64, at_least=2))
    """Number of bins per entry; 256 as in OpenVLA needs more demonstrations."""
    token_mode: str = rare(choice("uniform", TOKEN_MODES))
    """uniform or openvla, see `ActionTokenizer`."""
    queries: str = rare(choice("step", QUERIES))
    """step: one query per control step; token: one per entry of an action."""
    label_smoothing: float = rare(bounded(0.0, at_least=0, below=1))
    """Fraction of the cloning target that is spread over all bins."""
    label_spread: float = rare(bounded(0.0, at_least=0))
    """Standard deviation of a Gaussian cloning target on the scale of actions; 0 = only the demonstrated bin."""
    encoder: EncoderConfig = rare(field(default_factory=EncoderConfig))
    """Sizes of the observation encoder."""


class SmallVlaPolicy(EncodedPolicy, TokenPolicy):
    """Maps image, instruction and state to K * D action tokens."""

    kind = "small"
    config_class = SmallVlaConfig

    def __init__(self, config: SmallVlaConfig, vocabulary: Vocabulary, seed: int = 0) -> None:
        check_config(config)
        tokenizer = ActionTokenizer(config.bins, config.token_mode)
        super().__init__(tokenizer, config.chunk, config.action_size, config.label_smoothing, config.label_spread)
        self.config = config
        self.vocabulary = vocabulary
        each = 1 if config.queries == "token" else config.action_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.encoder = ObservationEncoder(config.encoder, vocabulary, self.decisions // each)
            self.head = nn.Linear(config.encoder.width, each * config.bins)

    def logits(self, batch: PolicyInputs) -> Tensor:
        found: Tensor = self.head(self.encoder(batch))
        return found.reshape(len(batch), self.decisions, self.config.bins)
