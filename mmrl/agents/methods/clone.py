"""Cloning an environment's expert: a warm start for agents, in the same loop as reinforcement learning.

The expert plays each task in an environment of the pool, and the policy is trained on its answers by maximum
likelihood. All turns of an episode are one packed pass, as in the other agent recipes.

`random_actions` is the fraction of turns that take, and train, a random action of the environment instead of the
expert's. Experiments on credit assignment need such a start, which knows the answer format and little else.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from mmrl.agents.agent_evaluation import AgentEvaluationConfig
from mmrl.agents.agent_recipe import AgentDomain, AgentParts, check_supervised
from mmrl.agents.environments.action_formats import SAY
from mmrl.agents.environments.agent_tasks import AgentTask, TaskSetConfig
from mmrl.agents.environments.environment import NATIVE
from mmrl.agents.environments.experts import (
    ExpertEnvironment,
    ExpertEpisode,
    ExpertFailedError,
    NoisyExpert,
    RemoteExpert,
    run_expert,
)
from mmrl.agents.rollout.conversation import Writer
from mmrl.agents.rollout.episodes import Episode, pack_episodes
from mmrl.agents.rollout.storage import replay_episode
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import bounded
from mmrl.training.processes import Streams, stream_seed
from mmrl.training.recipe import NoUsableTasksError, Step
from mmrl.training.settings import BaseRunConfig
from mmrl.training.supervised import SupervisedRecipe
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.engine.vlm_sampler import AnswerSampling
from mmrl.vlm.model.model_config import check_critic


@dataclass
class CloneEvaluationConfig(AgentEvaluationConfig):
    """Evaluation of a cloned agent in episodes."""

    sampler: AnswerSampling = field(default_factory=AnswerSampling)
    """Lengths of the responses in episodes."""


@dataclass
class AgentCloneConfig(AgentParts, BaseRunConfig):
    """A supervised run on the actions of an environment's expert; the environment needs an expert."""

    data: TaskSetConfig = field(default_factory=TaskSetConfig)
    """Tasks that the expert plays."""
    random_actions: float = bounded(0.0, at_least=0, at_most=1)
    """Fraction of turns in which a random action replaces the expert's."""
    play_once: bool = False
    """Whether to play each task only once and reuse its episode whenever the task comes up again. Useful for slow
    environments such as browsers, if the run goes through its tasks several times. A resumed run plays them again."""
    evaluation: CloneEvaluationConfig = field(default_factory=CloneEvaluationConfig)
    """Evaluation on held-out tasks, which the policy plays."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        self.check_parts(self.trainer.learning_rate)
        if self.actions.format == NATIVE and self.random_actions:
            raise ValueError(
                "random_actions draws actions without arguments, which tools do not take; leave it at 0 with "
                "actions.format native"
            )
        check_supervised(self)
        check_critic(self.model, needed=False)


class AgentCloneRecipe(AgentDomain, SupervisedRecipe[VlmPolicy, AgentTask]):
    """Maximum likelihood of an expert's responses."""

    config: AgentCloneConfig
    own_loss = "sft"

    def __init__(self, config: AgentCloneConfig) -> None:
        super().__init__(config)
        self.open(config, config.evaluation.sampler.config)
        self._known: dict[str, ExpertEpisode] = {}

    def check_data(self) -> None:
        """Reject an environment without an expert; raises UserError."""
        if not self.pool.has_expert:
            raise UserError(
                f"environment.factory: {self.config.environment.factory} creates an environment without an expert to "
                "clone; it needs a method `expert` that returns an Action"
            )

    def batch(self, policy: VlmPolicy, tasks: Sequence[AgentTask], streams: Streams, step: Step) -> Rollouts:
        """Run the expert on each task; the rows contain its responses and returns."""
        episodes = self.demonstrations(policy, tasks, streams)
        self._note(episodes)
        kept = [number for number, episode in enumerate(episodes) if episode.has_result]
        usable = [episodes[number] for number in kept]
        if not usable:
            raise NoUsableTasksError(f"none of the expert's episodes could be used: {episodes[0].reason}")
        rollouts = pack_episodes(usable, list(range(len(usable))), policy)
        earned = [episode.total for episode in usable]
        # the loss does not read them; metrics and records do
        rewards = torch.tensor(earned, dtype=torch.float32, device=rollouts.mask.device)
        return streams.select(kept).noted(rollouts.replace(reward=rewards))

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Teacher-forced scores, all turns of an episode in one pass."""
        return policy(rollouts, outputs=outputs)

    def demonstrations(self, policy: VlmPolicy, tasks: Sequence[AgentTask], streams: Streams) -> list[Episode]:
        """An episode of each task, with the responses to learn."""
        seeds, writer = streams.seeds(len(tasks), 1).tolist(), self.writer(policy)
        return [self._play(policy, writer, task, seed) for task, seed in zip(tasks, seeds, strict=True)]

    def _play(self, policy: VlmPolicy, writer: Writer, task: AgentTask, seed: int) -> Episode:
        config = self.config
        try:
            played = self._known.get(task.id) or self._ask_expert(task, seed)
        except ExpertFailedError as error:
            return Episode(task, ending="failed", reason=str(error))
        if config.play_once:
            self._known[task.id] = played
        return as_episode(played, task, policy, writer, config.episode.max_turns)

    def _ask_expert(self, task: AgentTask, seed: int) -> ExpertEpisode:
        config = self.config
        env: ExpertEnvironment = RemoteExpert(self.pool)
        if config.random_actions:
            if config.play_once:  # whichever process plays it first
                seed = stream_seed(config.seed, "clone", task.id)
            env = NoisyExpert(env, list(self.pool.actions), config.random_actions, random.Random(seed))
        try:
            format = None if config.actions.format == NATIVE else config.actions.name
            return run_expert(env, task.task, task.seed, format)
        except ExpertFailedError:
            env.close()
            raise


def as_episode(played: ExpertEpisode, task: AgentTask, policy: VlmPolicy, writer: Writer, max_turns: int) -> Episode:
    """The expert's episode in the form of an agent's episode; an episode that does not fit has no result."""
    turns = played.turns[:max_turns]
    answers = [writer.write(turn.action) for turn in turns]
    seen = [turn.observation for turn in turns]
    episode = replay_episode(task, list(zip(seen, answers, strict=True)), policy, writer)
    episode.success = played.success
    episode.last = played.last
    episode.refused = sum("action_error" in turn.info for turn in turns)
    episode.calls = sum(turn.action.name != SAY for turn in turns)
    episode.rewards = [0.0] * (episode.trajectory.turns - 1) + [played.reward] if episode.trajectory.turns else []
    return episode
