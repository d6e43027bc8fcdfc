"""An agent's episode: its conversation as prompts, its tokens as a trajectory, and a group of them as rollouts.

The `Writer` turns observations into prompts: the system turn, the first observation with the instruction, and then an
observation per turn. A `Trajectory` holds the tokens that followed the first prompt, and a row of `AgentPayload` is one
episode.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.environments.environment import CUT, ActionConfig, Observation
from mmrl.agents.environments.native_calls import NativeAnswer, read_native
from mmrl.agents.environments.videos import Video
from mmrl.core.blocks.turns import ANCHOR
from mmrl.core.payload import per_row, to_device
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import bounded, choice, rare
from mmrl.rewards.answers import final_part, with_think_tags
from mmrl.vlm.data.prompt import Context, Insert, Prompt, VlmPayload, join_prompts, leaves
from mmrl.vlm.data.task import ImageSource, VlmTask
from mmrl.vlm.engine.rows import text_prompt
from mmrl.vlm.engine.vlm_policy import VlmPolicy

PROMPT_END = 100
"""Characters of a prompt in which an opened thought is looked for."""
OMITTED = "[picture left out]"
"""Replaces an image that has left the history."""


@dataclass
class ConversationConfig:
    """How an episode is written as a conversation."""

    system: str = "You act in an environment. {manual}\nActions:\n{actions}"
    """System turn. {manual} is replaced by the manual of the action format and {actions} by the environment's actions,
    one per line. Empty: no system turn."""
    history_images: int = bounded(0, at_least=0)
    """Number of images to keep; older images are omitted, their text stays. 0 = all. A limit costs time: once it is
    reached, every turn re-reads the conversation from the beginning."""
    drop_thoughts: bool = False
    """Whether to remove the thoughts of earlier responses, as the chat templates of thinking models do. Every turn then
    re-reads the conversation from the beginning."""
    tools: bool = False
    """Whether the chat template describes the environment's `tools` to the model and their results are returned with
    role `tool`, all results of one response together."""

    def system_text(self, actions: ActionConfig, known: Mapping[str, str]) -> str:
        """The system turn."""
        listed = "\n".join(f"- {name}: {about}" if about else f"- {name}" for name, about in known.items())
        return self.system.replace("{manual}", actions.manual).replace("{actions}", listed).strip()


@dataclass
class _Part:
    """An observation or an answer."""

    prompt: Prompt
    """Its tokens, with all images."""
    observation: Observation | None = None
    """None for an answer."""
    note: str = ""
    """Text before the observation's text: the instruction, or why an answer could not be read."""
    end: int | None = None
    """For an observation, the token that ended the previous answer; None if that was cut."""
    spoken: Prompt | None = None
    """An answer without its thoughts, if it has any and they are dropped."""


@dataclass(frozen=True)
class Transcript:
    """A finished episode as chat turns, for reward functions."""

    prompt: list[dict[str, Any]]
    """The system turn and the first observation."""
    completion: list[dict[str, Any]]
    """Responses and later observations alternately, up to the observation after the last action."""
    images: list[NDArray[np.uint8]]
    """(H, W, 3) RGB of all turns, in order."""


@dataclass
class Conversation:
    """One episode's conversation so far."""

    task: AgentTask
    parts: list[_Part] = field(default_factory=list)
    num_omitted: int = 0
    """Images that the window has omitted so far."""

    @property
    def num_images(self) -> int:
        """Images shown so far."""
        return sum(len(part.observation.images) for part in self.parts if part.observation is not None)


class Writer:
    """Writes conversations for a policy; an observation that occurs in several of them is encoded once."""

    def __init__(
        self,
        policy: VlmPolicy,
        config: ConversationConfig,
        system: str,
        tools: Sequence[dict[str, Any]] = (),
        native: str = "",
    ) -> None:
        self._policy = policy
        self._config = config
        self._system = system
        self.tools = list(tools)
        self.native = native
        """Format of the model's own tool calls, key of `CALL_FORMATS`; empty if they are not read."""
        self._turns: dict[tuple[object, ...], Prompt] = {}

    def fresh(self) -> Writer:
        """A copy that has not encoded anything yet."""
        copied = copy.copy(self)
        copied._turns = {}
        return copied

    def begin(self, task: AgentTask, observation: Observation, prompt: Prompt | None = None) -> Conversation:
        """Start a conversation."""
        first = self._first(task, observation, observation.images) if prompt is None else prompt
        return Conversation(task, [_Part(first, observation, task.instruction)])

    def answer(self, conversation: Conversation, ids: list[int]) -> None:
        """Append the tokens of a response."""
        # the sampled tokens stay in the trajectory; only the history for later turns loses its thoughts
        spoken = self._spoken(conversation.parts[-1].prompt, ids) if self._config.drop_thoughts else None
        conversation.parts.append(_Part(text_prompt(torch.tensor(ids, dtype=torch.int64)), spoken=spoken))

    def read(self, conversation: Conversation, ids: list[int], finish: str) -> NativeAnswer:
        """The calls in the tokens of the last response, which have control tokens that its text lacks."""
        tokenizer = self._policy.processor.tokenizer
        return read_native(
            tokenizer.decode(ids, skip_special_tokens=False),
            self.native,
            self.tools,
            prompt_end=conversation.parts[-2].prompt.text[-PROMPT_END:],
            finish=finish,
            ends=tokenizer.convert_ids_to_tokens(list(self._policy.eos_ids)),
        )

    def follow(self, conversation: Conversation, observation: Observation, note: str = "") -> Prompt:
        """Append the next observation."""
        # An answer that was cut has no end token; the observation's turn then has to supply one.
        last = int(conversation.parts[-1].prompt.input_ids[-1])
        end = last if last in self._policy.eos_ids else None
        prompt = self._turn(conversation.task, observation, observation.images, note, end)
        conversation.parts.append(_Part(prompt, observation, note, end))
        return prompt

    def cut(self, conversation: Conversation) -> Prompt | None:
        """The conversation as one prompt without the oldest images and earlier thoughts; None if nothing is cut."""
        keep = self._config.history_images
        # 0 images to keep means all of them
        excess = max(conversation.num_images - keep, 0) if keep else 0
        # parts[-2] is the answer before the new observation: only its thoughts can be new to drop.
        if excess <= conversation.num_omitted and conversation.parts[-2].spoken is None:
            return None
        conversation.num_omitted = excess
        return join_prompts([self._kept(conversation, number, excess) for number in range(len(conversation.parts))])

    def transcript(self, conversation: Conversation, answers: Sequence[str], last: Observation | None) -> Transcript:
        """The whole conversation, with the observation after its last action, which the agent has not read."""
        seen = [(part.observation, part.note) for part in conversation.parts if part.observation is not None]
        # If the last part is an observation, it is `last` itself, appended for the critic.
        if last is not None and (last.text or last.images) and conversation.parts[-1].observation is None:
            # the agent never read it, but a reward function judges the state that the last action led to
            seen.append((last, ""))
        images = [image for observation, _ in seen for image in observation.images]
        observed = [
            _user_turn(observation, len(observation.images), note)
            | {"role": "tool" if number and self.tools and observation.results else "user"}
            for number, (observation, note) in enumerate(seen)
        ]
        if not images:  # as in TRL
            observed = [turn | {"content": turn["content"][-1]["text"]} for turn in observed]
        said = [{"role": "assistant", "content": answer} for answer in answers]
        # the last answer has no observation after it, or an observation no answer, hence `zip_longest`
        turns = list(filter(None, itertools.chain(*itertools.zip_longest(observed, said))))
        system = [{"role": "system", "content": self._system}] if self._system else []
        return Transcript([*system, turns[0]], turns[1:], images)

    def _messages(self, observation: Observation, kept: int, note: str) -> list[dict[str, Any]]:
        """A further observation with its last `kept` images: a turn of the user, or one for each result of a tool."""
        if not self.tools or note or not observation.results:
            return [_user_turn(observation, kept, note)]
        omitted, turns = len(observation.images) - kept, []
        for result in observation.results:
            # the oldest images go first, also among the results of one turn
            omitted -= (gone := min(omitted, result.images))
            turn = _turn_of(result.text, gone, result.images - gone) | {"role": "tool", "name": result.name}
            turns.append(turn | ({"tool_call_id": result.call_id} if result.call_id else {}))
        return turns

    def _kept(self, conversation: Conversation, number: int, excess: int) -> Prompt:
        """A part as it stays in the history."""
        part = conversation.parts[number]
        if part.observation is None:
            return part.prompt if part.spoken is None else part.spoken
        shown = self._without(conversation, number, excess)
        followed = number + 1 < len(conversation.parts) and conversation.parts[number + 1].spoken is not None
        return self._without_open_thought(shown) if followed else shown

    def _spoken(self, prompt: Prompt, ids: list[int]) -> Prompt | None:
        """An answer without its thoughts; None if it has no thoughts."""
        text = with_think_tags(prompt.answer_start + self._policy.turns.decode([ids])[0])
        spoken = final_part(text)
        if spoken == text:
            return None
        # The end token is copied from the sampled ids: the turn after it was encoded to follow exactly this token.
        kept = self._policy.turns.encode_past((spoken or "").lstrip("\n"))
        end = [token for token in ids[-1:] if token in self._policy.eos_ids]
        return text_prompt(torch.tensor([*kept, *end], dtype=torch.int64))

    def _without_open_thought(self, prompt: Prompt) -> Prompt:
        """A prompt without the `<think>` that it ends with; it shares its images' features with the whole one."""
        start = prompt.answer_start
        ids = self._policy.processor.tokenizer.encode(start, add_special_tokens=False)
        # Tokens are cut off, not encoded again; that is exact only if the tokenizer did not merge across the boundary.
        kept = len(prompt) - len(ids)
        if prompt.input_ids[kept:].tolist() != ids:
            raise UserError(f"conversation.drop_thoughts: the tokenizer merges {start!r} with the text before it")
        return dataclasses.replace(
            prompt,
            input_ids=prompt.input_ids[:kept],
            mm_token_type_ids=prompt.mm_token_type_ids[:kept],
            position_ids=prompt.position_ids[:, :kept],
            next_position=prompt.next_position - len(ids),
            media={},
            text=prompt.text.removesuffix(start),
            # the images' features are computed per leaf prompt: new objects would be encoded again
            parts=leaves(prompt),
        )

    def _without(self, conversation: Conversation, number: int, excess: int) -> Prompt:
        """An observation without its images that are among the first `excess` images of the conversation."""
        part = conversation.parts[number]
        assert part.observation is not None
        seen = sum(len(p.observation.images) for p in conversation.parts[:number] if p.observation is not None)
        gone = min(max(excess - seen, 0), len(part.observation.images))
        # the very object, whose features are already known
        if not gone:
            return part.prompt
        kept = part.observation.images[gone:]
        if number == 0:
            return self._first(conversation.task, part.observation, kept)
        return self._turn(conversation.task, part.observation, kept, part.note, part.end)

    def _first(self, task: AgentTask, observation: Observation, images: tuple) -> Prompt:
        messages = [{"role": "system", "content": self._system}] if self._system else []
        turn = _user_turn(observation, len(images), task.instruction)
        return self._policy.encode(VlmTask(task.id, [*messages, turn], self._sources(images), tools=self.tools))

    def _turn(self, task: AgentTask, observation: Observation, images: tuple, note: str, end: int | None) -> Prompt:
        # The shape belongs to the key: two images of different shapes can have the same bytes.
        seen = tuple((image.shape, blake2b(image.tobytes()).digest()) for image in images)
        key = (note, observation.text, observation.results, len(observation.images), end, seen)
        if key not in self._turns:  # one object, so that its images pass the vision tower once, too
            messages = self._messages(observation, len(images), note)
            turn = VlmTask(task.id, messages, self._sources(images), tools=self.tools)
            self._turns[key] = self._policy.encode_turn(turn, answered=end is not None, end=end)
        return self._turns[key]

    def _sources(self, images: tuple) -> list[ImageSource]:
        if images:
            self._policy.check_reads_media("an observation of the environment has an image")
        return [Image.fromarray(image) for image in images]


def _user_turn(observation: Observation, kept: int, front: str) -> dict[str, Any]:
    text = "\n".join(filter(None, (front, observation.text)))
    return _turn_of(text, len(observation.images) - kept, kept)


def _turn_of(text: str, omitted: int, shown: int) -> dict[str, Any]:
    left_out = [{"type": "text", "text": f"{OMITTED}\n"}] * omitted
    return {"role": "user", "content": [*left_out, *[{"type": "image"}] * shown, {"type": "text", "text": text}]}


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
class EpisodeConfig:
    """Limits on the length of episodes, and which of them run together."""

    max_turns: int = bounded(15, at_least=1)
    """Number of turns after which an episode is truncated, unless the environment ends it earlier."""
    success_above: float = rare(0.0)
    """An episode succeeds if the sum of its rewards exceeds this, unless the environment sets info["success"]."""
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
    ending: str = ""
    """Key of `ENDINGS`; empty while it runs."""
    reason: str = ""
    """Reason why it has no result, in one line."""
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
    "truncated": "The environment's limit or episode.max_turns was reached.",
    "unreadable": (
        "A response had no readable action, and actions.on_parse_error is terminate; or it is reply, and "
        "actions.max_invalid turns in a row had an error."
    ),
    "cut": "A response was truncated at the length limit, and actions.on_parse_error is terminate.",
    "failed": "The environment raised, hung, crashed or returned malformed data, so the episode has no result.",
    "overflow": "The next observation does not fit in the model's context, so the episode has no result.",
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
        time limit ended the episode; "bootstrap_mask" (B, T), 1 at `Trajectory.bootstrap_index`.
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
