"""Agent-R in outline: an agent learns to revise its own failures at the first error (arXiv 2501.11425).

In each step the policy plays every task a few times. If it fails a task, the worst episode is replayed up to its first
error, and the environment's expert continues from there; the expert's first answer begins with the thought
`revision.thought`. Training raises the likelihood of the revision; the agent's own turns before it are only context.
If every attempt at a task succeeds, its episodes are learned unchanged. The policy plays again in each step, so the
errors are always its current ones.

Not included from the paper: Monte-Carlo tree search, which finds good and bad trajectories without an expert; the
model's own judgement of the first error, which is here the first action that differs from the expert's; and the splice
that appends the good trajectory to the bad one as text, whereas here the environment really continues from the error.

Source: Yuan et al., Agent-R, arXiv 2501.11425, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from mmrl.agents.agent_recipe import AgentParts, check_supervised
from mmrl.agents.environments.agent_tasks import AgentTask, TaskSetConfig
from mmrl.agents.environments.environment import CUT, NATIVE, Action, as_outcome, as_start, write_answer
from mmrl.agents.environments.experts import (
    MOST_TURNS,
    ExpertEnvironment,
    ExpertEpisode,
    ExpertFailedError,
    ExpertTurn,
    RemoteExpert,
)
from mmrl.agents.methods.clone import AgentCloneRecipe, CloneEvaluationConfig, as_episode
from mmrl.agents.rollout.conversation import Writer
from mmrl.agents.rollout.episodes import Episode
from mmrl.core.loss import Metric
from mmrl.fields import bounded
from mmrl.training.processes import Streams
from mmrl.training.settings import BaseRunConfig
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.model.model_config import check_critic


@dataclass
class RevisionSettings:
    """Attempts and revisions."""

    attempts: int = bounded(4, at_least=1)
    """Episodes per task that the policy runs in a step."""
    temperature: float = bounded(1.0, above=0)
    """Sampling temperature of these episodes."""
    thought: str = "That was a mistake. I go on from here."
    """Thought in front of the first action of a revision. Empty: none, for formats that have no thoughts."""


@dataclass
class AgentRevisionConfig(AgentParts, BaseRunConfig):
    """An Agent-R run; the environment needs an expert."""

    data: TaskSetConfig = field(default_factory=TaskSetConfig)
    """Tasks that the policy attempts and the expert completes."""
    revision: RevisionSettings = field(default_factory=RevisionSettings)
    """Attempts and revisions."""
    evaluation: CloneEvaluationConfig = field(default_factory=CloneEvaluationConfig)
    """Evaluation on held-out tasks; the attempts use the same sampler."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        self.check_parts(self.trainer.learning_rate)
        if self.actions.format == NATIVE:
            raise ValueError(
                "agent_revision writes a thought before the expert's action, which actions.format native cannot; set "
                "actions.format: tool_call"
            )
        check_supervised(self)
        check_critic(self.model, needed=False)
        if self.actions.limit > 1:
            raise ValueError(
                f"actions.max_actions is {self.actions.max_actions}, but the expert takes one action per turn, and so "
                "must the episodes that it revises; leave it at 1"
            )


def revise(
    env: ExpertEnvironment, task: Mapping[str, Any], seed: int, said: Sequence[Action], format: str, thought: str = ""
) -> tuple[ExpertEpisode, int]:
    """Follow an agent's actions up to the first one that differs from the expert's, then follow the expert.

    Args:
        env: the environment.
        task: as its `reset` takes it.
        seed: of the episode.
        said: the agent's actions, with their answers as `text`.
        format: in which the expert's answers are written.
        thought: in front of the first of these, after an error.

    Returns:
        The episode, and its first turns that are the agent's.

    Raises:
        ExpertFailedError: the episode did not end.
    """
    observation, info = as_start(env.reset(task, seed))
    complete = info.get("task", task)
    turns = list[ExpertTurn]()
    own = 0
    erred = False
    total = 0.0
    for number in range(MOST_TURNS):
        # asked in every turn, also where the agent's action is taken: an expert follows the state
        move = env.expert()
        # the first difference ends the agent's part, and the wrong action is its last one
        if own == number < len(said) and not erred:
            action, own = said[number], number + 1
            erred = (action.name, action.arguments) != (move.name, move.arguments)
        else:
            # once, in front of the first action after the error
            action = replace(move, text=write_answer([move], format, thought if erred and own == number else ""))
        outcome = as_outcome(env.step(action))
        turns.append(ExpertTurn(observation, action, outcome.info))
        observation, total = outcome.observation, total + outcome.reward
        if outcome.terminated or outcome.truncated:
            success = bool(outcome.info.get("success", total > 0))
            return ExpertEpisode(complete, seed, tuple(turns), observation, total, success), own
    raise ExpertFailedError(f"the revision of {dict(task)} did not finish within {MOST_TURNS} turns")


class AgentRevisionRecipe(AgentCloneRecipe):
    """Maximum likelihood of revisions of the policy's own failures."""

    config: AgentRevisionConfig  # type: ignore[assignment]

    def demonstrations(self, policy: VlmPolicy, tasks: Sequence[AgentTask], streams: Streams) -> list[Episode]:
        """Run the tasks, and have the expert revise the failures."""
        own = self.config.revision
        asked = [task for task in tasks for _ in range(own.attempts)]
        seeds = streams.seeds(len(tasks), own.attempts, purpose="attempts").tolist()
        played = self.run_episodes(policy, asked, seeds, temperature=own.temperature)
        # by place, not by name: a step may hold a task twice, and another process the second one
        groups = [played[first : first + own.attempts] for first in range(0, len(played), own.attempts)]
        worst = [min((one for one in group if one.has_result), key=_total, default=None) for group in groups]
        found = [episode for episode in worst if episode is not None]
        failed = sum(not episode.success for episode in found)
        self.noted["revision/failed"] = Metric(float(failed), float(len(found)))
        writer = self.writer(policy)
        return [self._revised(policy, writer, task, one) for task, one in zip(tasks, worst, strict=True)]

    def _revised(self, policy: VlmPolicy, writer: Writer, task: AgentTask, worst: Episode | None) -> Episode:
        config = self.config
        if worst is None:
            return Episode(task, ending="failed", reason="no attempt has a result")
        said, env = self._actions(worst), RemoteExpert(self.pool)
        try:
            if worst.success:
                # a success is learnt as it is: played again with the agent's own actions as the expert's
                played, own = revise(_Agreeing(env, said), task.task, task.seed, said, config.actions.name)[0], 0
            else:
                played, own = revise(env, task.task, task.seed, said, config.actions.name, config.revision.thought)
        except ExpertFailedError as error:
            env.close()
            return Episode(task, ending="failed", reason=str(error))
        episode = as_episode(played, task, policy, writer, config.episode.max_turns)
        steps = episode.trajectory
        # actions of the agent, the error included, are read but not learnt
        steps.sampled = [known and turn >= own for known, turn in zip(steps.sampled, steps.turn, strict=True)]
        if not any(steps.sampled):
            episode.ending = "failed"
            episode.reason = "the error is in the last turn"
        return episode

    def _actions(self, episode: Episode) -> list[Action]:
        """Actions of an episode's answers, to the first that cannot be read."""
        found: list[Action] = []
        for answer, error in zip_longest(episode.answers, episode.errors):
            parsed = self.config.actions.parse(answer, cut=error == CUT)
            if not parsed.actions:
                break
            found.append(replace(parsed.actions[0], text=answer))
        return found


def _total(episode: Episode) -> float:
    return episode.total


class _Agreeing:
    """An environment whose expert does what an agent did."""

    def __init__(self, env: ExpertEnvironment, said: Sequence[Action]) -> None:
        self.reset = env.reset
        self.step = env.step
        self.close = env.close
        self._left = iter(said)

    def expert(self) -> Action:
        """The next action."""
        move = next(self._left, None)
        if move is None:
            raise ExpertFailedError("the agent's episode continues when it is replayed")
        return move
