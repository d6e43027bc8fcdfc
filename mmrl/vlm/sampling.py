"""Options and results of sampling."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from mmrl.errors import ConfigError
from mmrl.fields import bounded, rare

LENGTH, EOS, STOP = range(3)
FINISH_REASONS = ("length", "eos", "stop")


@dataclass
class SamplerConfig:
    """Lengths, temperature and truncation of sampled responses."""

    max_new_tokens: int = bounded(64, at_least=1)
    """Longest response in tokens."""
    temperature: float = bounded(1.0, above=0)
    """Logits are divided by it, in sampling and in scoring."""
    top_p: float = bounded(1.0, above=0, at_most=1)
    """Draw only from the most likely tokens that together have this probability; below 1 the recorded
    log-probabilities stay those of the full distribution."""
    top_k: int = bounded(0, at_least=0)
    """Draw only from this many of the most likely tokens; 0 is all."""
    stop: list[str] = rare(field(default_factory=list))
    """A response ends with the token that completes one of these strings in its decoded text."""
    batch_rows: int = bounded(256, at_least=1)
    """Most responses that are decoded at a time; for memory only, the responses do not depend on it."""
    lean: bool = rare(True)
    """Decode with the project's own lean decoder where the model allows it; else through transformers."""
    keep_prefill: bool = rare(True)
    """Use what sampling computed of the prompts until the weights change; with one update on all rows, in it too."""

    def validate(self) -> None:
        """Refuse empty stop strings; raises ConfigError."""
        if not all(self.stop):
            raise ConfigError(f"sampler.stop is {self.stop}; it must be made of non-empty strings")


@dataclass
class AnswerSampling:
    """Lengths of the answers that an evaluation samples; its temperature is `evaluation.temperature`."""

    max_new_tokens: int = bounded(64, at_least=1)
    """Longest answer in tokens."""
    stop: list[str] = rare(field(default_factory=list))
    """An answer ends with the token that completes one of these strings in its decoded text."""
    batch_rows: int = bounded(256, at_least=1)
    """Most answers that are decoded at a time; for memory only, the answers do not depend on it."""
    lean: bool = rare(True)
    """Decode with the project's own lean decoder where the model allows it; else through transformers."""

    @property
    def config(self) -> SamplerConfig:
        """The same for the sampler."""
        return SamplerConfig(
            max_new_tokens=self.max_new_tokens, stop=self.stop, batch_rows=self.batch_rows, lean=self.lean
        )

    def validate(self) -> None:
        """Refuse empty stop strings; raises ConfigError."""
        if not all(self.stop):
            raise ConfigError(f"evaluation.sampler.stop is {self.stop}; it must be made of non-empty strings")


@dataclass
class Samples:
    """Responses of N prompts with G samples each, row = prompt * G + sample; B rows of T tokens."""

    response_ids: Tensor
    """(B, T) int64, right-padded with the pad token."""
    mask: Tensor
    """(B, T) float32, 1 up to and including the token that ends the response."""
    logp: Tensor
    """(B, T) float32, log-probability under the full softmax at the sampling temperature, 0 on padding."""
    finish: list[str]
    """Row of `FINISH_REASONS` for each response."""
    texts: list[str]
    """The decoded responses without control tokens; a stop string stays at the end."""
    nucleus_mass: Tensor
    """(B, T) float32, probability of the tokens that top_p and top_k left to draw from, 1 on padding."""
