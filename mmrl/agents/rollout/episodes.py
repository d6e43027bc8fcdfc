"""An agent's episode: its tokens as a trajectory, and a group of episodes as rollouts.

A `Trajectory` holds the tokens that followed the first prompt, and a row of `AgentPayload` is one episode, whose tokens
may have been read in several contexts.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.environments.environment import CUT, Observation
from mmrl.agents.environments.videos import Video
from mmrl.agents.rollout.conversation import Transcript
from mmrl.core.blocks.turns import ANCHOR
from mmrl.core.payload import per_row, to_device
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, only_with, rare
from mmrl.vlm.data.prompt import Context, Insert, Prompt, VlmPayload
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.vlm_policy import VlmPolicy


@dataclass
class Trajectory:
    """The tokens of one trajectory after its first prompt, in the order in which the model reads them."""

    ids: list[int] = field(default_factory=list)
    """Sampled tokens and given tokens (such as observations)."""
    logp: list[float] = field(default_factory=list)
    """Log-probability in nats of each sampled token; 0 for given ones."""
    turn: list[int] = field(default_factory=list)
    """Turn of each token; an observation belongs to the turn after it."""
    sampled: list[bool] = field(default_factory=list)
    """Whether the policy sampled the token."""
    inserts: list[Insert] = field(default_factory=list)
    """Observations between the turns."""
    contexts: list[Context] = field(default_factory=list)
    """Points at which the history was cut and the trajectory continues after another prompt."""
    turns: int = 0
    """Turns sampled so far."""
    bootstrap_index: int | None = None
    """Index of the token after the last observation, at which the critic estimates the state's value."""

    def add_turn(self, ids: Sequence[int], logp: Sequence[float]) -> None:
        """Append the tokens that the policy sampled in a turn."""
        self._append(ids, logp, sampled=True)
        self.turns += 1

    def add_given(self, prompt: Prompt) -> None:
        """Append the text and images before the agent's next turn."""
        self.inserts.append(Insert(len(self.ids), prompt))
        self._append(prompt.input_ids.tolist(), [0.0] * len(prompt), sampled=False)

    def restart(self, prompt: Prompt) -> None:
        """Continue after another prompt, which replaces everything up to here."""
        self.contexts.append(Context(len(self.ids), prompt))

    def add_bootstrap_observation(self, prompt: Prompt, restart: bool = False) -> None:
        """Append the observation after the last action, so that a critic can value the state of a truncated episode."""
        self.restart(prompt) if restart else self.add_given(prompt)
        self.bootstrap_index = len(self.ids)
        # A value belongs to the state before a token: a copy of the last sampled one fills the next answer's slot.
        last = next(token for token, sampled in zip(self.ids[::-1], self.sampled[::-1], strict=True) if sampled)
        self._append([last], [0.0], sampled=False)

    @property
    def sampled_ids(self) -> list[int]:
        """Tokens that the policy sampled."""
        return list(itertools.compress(self.ids, self.sampled))

    def last_tokens(self) -> list[int]:
        """Index of the last sampled token of each turn."""
        # later indices overwrite earlier ones, so each turn keeps its last sampled token
        found = {turn: index for index, turn in enumerate(self.turn) if self.sampled[index]}
        return [found[turn] for turn in sorted(found)]

    def _append(self, ids: Sequence[int], logp: Sequence[float], *, sampled: bool) -> None:
        self.ids += ids
        self.logp += logp
        # `turns` has not been incremented yet: an observation counts towards the turn that reads it
        self.turn += [self.turns] * len(ids)
        self.sampled += [sampled] * len(ids)


@dataclass
class TokenTable:
    """B trajectories, right-padded to the longest one, T tokens."""

    ids: Tensor
    """(B, T) int64."""
    mask: Tensor
    """(B, T) float32, 1 on sampled tokens."""
    logp: Tensor
    """(B, T) float32, 0 if nothing was sampled."""
    turn: Tensor
    """(B, T) int64, -1 on padding."""
    inserts: list[tuple[Insert, ...]]
    contexts: list[tuple[Context, ...]]


def tabulate_tokens(rows: Sequence[Trajectory], pad_id: int) -> TokenTable:
    """Pad trajectories to one table."""
    width = max([1, *(len(row.ids) for row in rows)])

    def table(columns: Sequence[Sequence[float]], padding: float, dtype: torch.dtype) -> Tensor:
        padded = [[*column, *[padding] * (width - len(column))] for column in columns]
        return torch.tensor(padded, dtype=dtype)

    return TokenTable(
        ids=table([row.ids for row in rows], pad_id, torch.int64),
        # the mask is whether the policy sampled the token; observations are read but not trained
        mask=table([row.sampled for row in rows], 0, torch.float32),
        logp=table([row.logp for row in rows], 0.0, torch.float32),
        turn=table([row.turn for row in rows], -1, torch.int64),
        inserts=[tuple(row.inserts) for row in rows],
        contexts=[tuple(row.contexts) for row in rows],
    )


@dataclass
class OverflowConfig:
    """Effect of a turn that does not fit in the model's context."""

    result: str = choice("truncated", ("truncated", "failed"))
    """truncated: the episode ends before the turn, keeps its turns and rewards, and counts as truncated, so that a
    critic estimates what would have followed; failed: the episode has no result, as if its environment had failed, and
    is left out of its group. An episode whose first prompt does not fit never has a result."""
    reward: float = rare(only_with(bounded(0.0, at_most=0), result="truncated"))
    """Reward at the last token of an episode that overflows, in addition to the environment's rewards."""


@dataclass
class EpisodeConfig:
    """Limits on the length of episodes, and which of them run together."""

    max_turns: int = bounded(15, at_least=1)
    """Number of turns after which an episode is truncated, unless the environment ends it earlier."""
    success_above: float = rare(0.0)
    """An episode succeeds if the sum of its rewards exceeds this, unless the environment sets info["success"]."""
    overflow: OverflowConfig = rare(field(default_factory=OverflowConfig))
    """Effect of a turn that does not fit in the model's context, room for `sampler.max_new_tokens` included."""
    cohort: int | None = bounded(None, at_least=1)
    """Number of episodes that take their turns together, at most environment.workers. While the environments of one
    cohort work, other cohorts are sampled, so slow environments hold up only their own cohort. Smaller cohorts wait
    less and make smaller batches; 1 = each episode by itself. Equal runs have equal bits for any value. Default: all
    episodes take their turns together."""
    batching: str = choice("cohorts", ("cohorts", "dynamic"))
    """How training batches are formed with sampler.engine: vllm. cohorts: by `cohort`. dynamic: all episodes that wait
    for an answer; batches then depend on how long the environments take, so a run does not repeat bit for bit.
    Evaluation is always in cohorts."""
    spare: int = rare(bounded(0, at_least=0))
    """Additional training episodes of each task. They replace, in order, those that their environment lost, so that
    groups stay complete; the others are discarded, whichever ended first."""


@dataclass
class Episode:
    """One episode and how it ended."""

    task: AgentTask
    prompt: Prompt | None = None
    """First prompt; None if the environment did not start."""
    trajectory: Trajectory = field(default_factory=Trajectory)
    rewards: list[float] = field(default_factory=list)
    """The environment's reward of each turn."""
    seconds: list[float] = field(default_factory=list, compare=False)
    """Time of each turn: sampling the responses of all running episodes, plus this episode's actions."""
    anchors: list[int] = field(default_factory=list)
    """The observation before each turn, as `mmrl.agents.rollout.episodes` numbers it."""
    gains: list[float] = field(default_factory=list)
    """Information gain of each turn except the last, if the objective needs it; see `mmrl.agents.rollout.gains`."""
    parent: int = -1
    """Index in the group of the episode that it branched from; -1 if it did not branch."""
    shared_turns: int = 0
    """Number of initial turns shared with the episode that it branched from."""
    answers: list[str] = field(default_factory=list)
    """The agent's text of each turn."""
    errors: list[str] = field(default_factory=list)
    """`ParsedAnswer.error` of each response; empty if it has actions."""
    refused: int = 0
    """Actions that the environment could not execute."""
    calls: int = 0
    """Tool calls: actions other than saying something."""
    tool_errors: dict[str, int] = field(default_factory=dict)
    """Number of tool calls that ended in an error, by kind."""
    actions: list[str] = field(default_factory=list)
    """Digest of each executed action; equal names and arguments have equal digests."""
    step_seconds: list[float] = field(default_factory=list, compare=False)
    """Seconds that the environment took for each of these actions."""
    overflows: bool = False
    """Whether it ended because its next turn does not fit in the model's context."""
    ending: str = ""
    """Key of `ENDINGS`; empty while it runs."""
    reason: str = ""
    """Reason why it has no result, or ended early, in one line."""
    success: bool = False
    finish: str = ""
    """Reason why the last response ended: "eos", "stop" or "length"."""
    final_answer: str = ""
    """The argument `answer` of its last action, as of `finish`; empty without one."""
    last: Observation = field(default_factory=Observation)
    """The last observation."""
    video: Video | None = None
    """Observations and actions, if they are recorded."""
    transcript: Transcript | None = None
    """The conversation, until the run's reward functions have scored it; None without such functions."""
    added_reward: float = 0.0
    """Weighted sum of the run's reward functions; NaN if one failed."""
    terms: dict[str, float] = field(default_factory=dict)
    """Unweighted value of each reward function."""

    @property
    def has_result(self) -> bool:
        """Whether its reward counts."""
        return self.ending not in NO_RESULT

    @property
    def unreadable(self) -> int:
        """Answers without a readable action, not counting those that were cut."""
        return sum(error not in ("", CUT) for error in self.errors)

    @property
    def invalid_streak(self) -> int:
        """Number of latest turns with an error, not counting those that were cut."""
        read = [error for error in self.errors if error != CUT]
        return len(read) - max((number for number, error in enumerate(read, 1) if not error), default=0)

    @property
    def total(self) -> float:
        """Sum of the environment's rewards; NaN without a result."""
        return sum(self.rewards) if self.has_result else math.nan


NO_RESULT = ("failed", "overflow")
"""Endings of episodes that have no reward."""

ENDINGS: dict[str, str] = {
    "terminated": "The environment ended the episode.",
    "truncated": (
        "The environment's limit or episode.max_turns was reached, or the next turn does not fit in the model's "
        "context."
    ),
    "unreadable": (
        "A response had no readable action, and actions.on_parse_error is terminate; or it is reply, and "
        "actions.max_invalid turns in a row had an error."
    ),
    "cut": "A response was truncated at the length limit, and actions.on_parse_error is terminate.",
    "failed": (
        "The environment raised, hung, crashed, or returned malformed data or an image that the model cannot read, so "
        "the episode has no result."
    ),
    "overflow": (
        "A turn does not fit in the model's context, so the episode has no result: the first one, or a later one with "
        "episode.overflow.result failed."
    ),
}


@dataclass
class AgentPayload(VlmPayload):
    """Episodes of B rows, after the first prompt of their group."""

    episodes: list[Episode] = per_row(default_factory=list)
    """The episode of each row."""


def pack_episodes(episodes: Sequence[Episode], group: Sequence[int], policy: VlmPolicy) -> Rollouts:
    """Turn finished episodes into rollouts.

    An episode whose first observation differs from its group's continues after a separate prompt. One without a
    result has no trained decision.

    Returns:
        Rows with the log-probabilities as sampled, the turn of each token, and the reward still NaN. Extras:
        "decision_reward" (B, T), the environment's reward at the last token of each turn; "truncated" (B,), 1 where a
        limit of time or context ended the episode; "bootstrap_mask" (B, T), 1 at `Trajectory.bootstrap_index`.
    """
    prompts = _first_prompts(episodes, group)
    rows = [_with_own_context(episode, prompts[number]) for episode, number in zip(episodes, group, strict=True)]
    table = tabulate_tokens([episode.trajectory for episode in rows], policy.pad_id)
    rewards, bootstrap_mask = torch.zeros_like(table.logp), torch.zeros_like(table.logp)
    for row, episode in enumerate(episodes):
        index = episode.trajectory.last_tokens()
        # On the last token of the turn, because the environment pays after reading the whole answer.
        rewards[row, index] = torch.tensor(episode.rewards[: len(index)])
        if episode.trajectory.bootstrap_index is not None:
            bootstrap_mask[row, episode.trajectory.bootstrap_index] = 1.0
    truncated = torch.tensor([float(episode.ending == "truncated") for episode in episodes])
    # Episodes without a result keep their row, so that payload and group stay aligned, but are not trained on.
    mask = table.mask * torch.tensor([episode.has_result for episode in episodes])[:, None]
    columns = (table.ids, mask, table.logp, table.turn, rewards, truncated, bootstrap_mask, torch.tensor(list(group)))
    ids, mask, logp, turn, rewards, truncated, bootstrap_mask, own = (to_device(x, policy.device) for x in columns)
    tasks = {number: episode.task for episode, number in zip(episodes, group, strict=True)}
    payload = AgentPayload(
        prompts=prompts,
        # ids alone: the prompts are already encoded
        tasks=[VlmTask(tasks[number].id, []) for number in range(len(prompts))],
        response_ids=ids,
        texts=["\n".join(episode.answers) for episode in rows],
        finish=[episode.finish for episode in rows],
        inserts=table.inserts,
        contexts=table.contexts,
        episodes=list(episodes),
    )
    return Rollouts(
        group=own,
        mask=mask,
        logp_old=logp,
        reward=torch.full((len(episodes),), float("nan"), device=own.device),
        payload=payload,
        turn=turn,
        extras={"decision_reward": rewards, "truncated": truncated, "bootstrap_mask": bootstrap_mask},
    )


def pack_groups(groups: Sequence[Sequence[Episode]], policy: VlmPolicy) -> Rollouts:
    """Turn the episodes of whole groups into rollouts with `pack_episodes`."""
    group = [number for number, own in enumerate(groups) for _ in own]
    return pack_episodes([episode for own in groups for episode in own], group, policy)


def _first_prompts(episodes: Sequence[Episode], group: Sequence[int]) -> list[Prompt]:
    """The first prompt of each group."""
    found: dict[int, Prompt] = {}
    for episode, number in zip(episodes, group, strict=True):
        if episode.prompt is not None:
            # the first episode that started gives the prompt of its group
            found.setdefault(number, episode.prompt)
    missing = sorted(set(group) - found.keys())
    if missing:
        raise ValueError(f"no episode of the groups {missing} started; remove these groups.")
    return [found[number] for number in range(len(found))]


def _with_own_context(episode: Episode, prompt: Prompt) -> Episode:
    """The episode, with its own first prompt as a context if it differs from the group's."""
    # Identity, not equality: the runner gives episodes with equal first observations the same prompt object.
    if episode.prompt is None or episode.prompt is prompt:
        return episode
    own = dataclasses.replace(episode.trajectory, contexts=[Context(0, episode.prompt), *episode.trajectory.contexts])
    return dataclasses.replace(episode, trajectory=own)


def share_prompts(episodes: Sequence[Episode]) -> None:
    """Give episodes of one task with equal first prompts the same object, so that it is read once."""
    first = dict[str, list[Prompt]]()
    for episode in episodes:
        if episode.prompt is None:
            continue
        known = first.setdefault(episode.task.id, [])
        # by place and not by time: the kept object has the features that sampling computed
        same = next((prompt for prompt in known if equal_prompts(prompt, episode.prompt)), None)
        if same is None:
            known.append(episode.prompt)
        else:
            episode.prompt = same


def equal_prompts(one: Prompt, other: Prompt) -> bool:
    """Whether two prompts have equal tokens and pixels."""
    if one is other:
        return True
    # pixels too: equal tokens may stand for different images
    if one.input_ids.shape != other.input_ids.shape or one.media.keys() != other.media.keys():
        return False
    pairs = [(one.input_ids, other.input_ids), *((one.media[name], other.media[name]) for name in one.media)]
    # stored prompts are on the CPU
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


def number_observation(observation: Observation, info: Mapping[str, Any]) -> int:
    """A 64-bit hash of `info["anchor"]` if present, else of the observation's text and images."""
    parts = [info[ANCHOR]] if ANCHOR in info else [observation.text, *observation.images]
    digest = blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, np.ndarray):
            digest.update(repr((part.shape, part.dtype.str)).encode())
            digest.update(part.tobytes())
        else:
            digest.update(repr(part).encode())
    return int.from_bytes(digest.digest(), "little", signed=True)


def tabulate_anchors(episodes: Sequence[Episode], turn: Tensor) -> Tensor:
    """(B, T) int64, the number of the observation before each decision's turn (B, T); 0 outside turns."""
    return _tabulate([episode.anchors for episode in episodes], turn, torch.int64)


def tabulate_durations(episodes: Sequence[Episode], turn: Tensor) -> Tensor:
    """(B, T) float32, the seconds of each decision's turn (B, T); 0 outside turns."""
    return _tabulate([episode.seconds for episode in episodes], turn, torch.float32)


def _tabulate(numbers: Sequence[Sequence[float]], turn: Tensor, dtype: torch.dtype) -> Tensor:
    width = max(1 + int(turn.max()), *map(len, numbers))
    rows = [[*own, *[0] * (width - len(own))] for own in numbers]
    table = torch.tensor(rows, dtype=dtype, device=turn.device)
    return torch.where(turn < 0, 0, table.gather(1, turn.clamp(min=0)))
