"""The trained modules: the temporal agent and, if `answerer.train` is set, the model that reads the picked frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.payload import Payload, per_decision, per_group, per_row, shared, take_rows
from mmrl.core.rollouts import Rollouts
from mmrl.vlm.data.prompt import Prompt, VlmPayload
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.tspo.agent import AgentSettings, TemporalAgent, load_agent_weights, save_agent
from mmrl.vlm.tspo.needle_tasks import NeedleTask
from mmrl.vlm.tspo.picking import NEVER, pick_logprobs

READER_FOLDER = "reader"


@dataclass(frozen=True)
class VideoFeatures:
    """The agent's input for a question."""

    frames: Tensor
    """(T, D) embeddings of the candidates."""
    text: Tensor
    """(D,) embedding of the question."""

    def to(self, device: torch.device | str) -> VideoFeatures:
        """The same on a device."""
        return VideoFeatures(self.frames.to(device), self.text.to(device))


@dataclass
class TspoPayload(Payload):
    """Questions of N groups, and the picks and answers of B rows.

    A row's decisions are its K picks, in the order in which they were drawn, then the R tokens of its answer where the
    language model is trained.
    """

    tasks: list[NeedleTask] = per_group()
    """The question of each group."""
    features: list[VideoFeatures] = per_group()
    """The agent's input of each group."""
    picks: Tensor = per_decision()
    """(B, K) int64, indices of candidates, 0 on padding."""
    pick_mask: Tensor = per_decision()
    """(B, K) float, 1 on picks."""
    texts: list[str] = per_row()
    """The answer of each row."""
    correct: Tensor = per_row()
    """(B,) float, 1 for a correct answer, NaN if it could not be judged."""
    noise: list[Tensor] = per_row(default_factory=list)
    """(T,) Gumbel draws of each row; empty if its log-probability does not need them."""
    prompts: list[Prompt] = per_row(default_factory=list)
    """The prompt of each row of a trained model; empty without one."""
    response_ids: Tensor | None = per_decision(default=None)
    """(B, R) int64, its sampled tokens."""
    finish: list[str] = per_row(default_factory=list)
    """Reason why each response ended."""
    temperature: float = shared(default=1.0)
    """Temperature at which the picks were drawn."""


class TspoPolicy(nn.Module):
    """The agent and, if it is trained too, the model that answers."""

    def __init__(
        self, agent: TemporalAgent, settings: AgentSettings, reader: VlmPolicy | None = None, reader_rate: float = 1.0
    ) -> None:
        super().__init__()
        self.agent = agent
        self.settings = settings
        self.reader = reader
        self.learning_rate_factors = {"reader": reader_rate}  # read by `mmrl.training.optimizer.make_optimizer`

    @property
    def device(self) -> torch.device:
        """Device of the agent."""
        return self.agent.query.weight.device

    def logits(self, features: Sequence[VideoFeatures], temperature: float) -> Tensor:
        """Scores over temperature (N, T) float32, `NEVER` on padding."""
        frames = [one.frames.to(self.device) for one in features]
        lengths = torch.tensor([len(one) for one in frames], device=self.device)
        padded = nn.utils.rnn.pad_sequence(frames, batch_first=True)
        text = torch.stack([one.text.to(self.device) for one in features])
        scores = self.agent(padded, text, lengths).float() / temperature
        real = torch.arange(padded.shape[1], device=self.device) < lengths[:, None]
        return scores.masked_fill(~real, NEVER)

    def forward(self, rollouts: Rollouts, logprob: str, token_temperature: float) -> PolicyOutputs:
        """Log-probabilities (B, T) of picks in one of `LOGPROBS`' forms and, of a trained model, of tokens.

        Gradient: into the agent, and into the model through its tokens.
        """
        payload = TspoPayload.of(rollouts)
        group = rollouts.group.to(self.device)
        logits = take_rows(self.logits(payload.features, payload.temperature), group)
        noise = None
        if payload.noise:
            noise = torch.zeros_like(logits)
            for row, own in enumerate(payload.noise):
                noise[row, : len(own)] = own.to(logits.device)
        picks, mask = payload.picks.to(self.device), payload.pick_mask.to(self.device)
        parts = [pick_logprobs(logprob, logits, picks, mask, noise)]
        if self.reader is not None:
            parts.append(self._token_logprobs(rollouts, payload, token_temperature))
        return PolicyOutputs(logp=torch.cat(parts, 1)[:, : rollouts.num_decisions])

    def _token_logprobs(self, rollouts: Rollouts, payload: TspoPayload, temperature: float) -> Tensor:
        """The language model's part: every row is a separate group, since it read its own frames."""
        assert self.reader is not None
        assert payload.response_ids is not None
        mask = rollouts.mask[:, payload.picks.shape[1] :]
        rows = Rollouts(
            group=torch.arange(rollouts.num_rows, device=mask.device),
            mask=mask,
            logp_old=torch.zeros_like(mask),
            reward=rollouts.reward,
            payload=VlmPayload(
                payload.prompts,
                [payload.tasks[group].task for group in rollouts.group.tolist()],
                payload.response_ids[:, : mask.shape[1]],
                payload.texts,
                payload.finish,
            ),
        )
        return self.reader(rows, temperature=temperature).logp

    def save_pretrained(self, path: Path | str) -> None:
        """Write the agent's folder and, in a folder inside it, a trained model."""
        save_agent(self.agent, self.settings, Path(path))
        if self.reader is not None:
            self.reader.save_pretrained(Path(path) / READER_FOLDER)

    def load_weights(self, path: Path | str) -> None:
        """Load the weights of `save_pretrained`, bit for bit; raises UserError."""
        load_agent_weights(self.agent, Path(path))
        if self.reader is not None:
            self.reader.load_weights(Path(path) / READER_FOLDER)
