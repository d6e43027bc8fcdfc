"""Runs an agent's episodes: many environments and conversations in parallel, sampled in batches.

An episode takes a slot of the pool of environments; further episodes start as slots become free. Each episode has its
own random numbers, so it does not depend on which other episodes run at the same time.

A cohort is a set of episodes that take their turns together, in forward passes of their own. While the environments of
one cohort work, others are sampled. Which rows a pass holds, and which images it encodes, follows from the cohort's own
history, so equal runs have equal bits however long the environments take.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmrl.agents.environments.action_formats import SAY
from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.environments.env_pool import EnvPool, TurnResult
from mmrl.agents.environments.environment import (
    CUT,
    TOOL_ERROR,
    Action,
    ActionConfig,
    CallResult,
    Observation,
    ParsedAnswer,
)
from mmrl.agents.environments.native_calls import OK, ToolCall
from mmrl.agents.environments.programs import count_calls
from mmrl.agents.environments.videos import Video
from mmrl.agents.rollout.cohorts import Cohort, split_cohorts
from mmrl.agents.rollout.conversation import Conversation, Writer
from mmrl.agents.rollout.episodes import Episode, EpisodeConfig, number_observation, share_prompts
from mmrl.agents.rollout.turns import TurnSampler
from mmrl.errors import UserError
from mmrl.runs.run_log import stopwatch
from mmrl.vlm.data.prompt import Prompt
from mmrl.vlm.data.task import TaskError
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig, Samples
from mmrl.vlm.inference.inference_sampler import EngineSampler
from mmrl.workers.engine import one_line


@dataclass(frozen=True)
class Fork:
    """The first turns of an episode, which another episode repeats before it diverges."""

    source: Episode
    turns: int
    """Number of turns to repeat, fewer than the source has."""

    def answer(self, turn: int) -> _Answer:
        """Answer of the source in a turn."""
        steps = self.source.trajectory
        own = [index for index, number in enumerate(steps.turn) if number == turn and steps.sampled[index]]
        ids, logp = ([column[index] for index in own] for column in (steps.ids, steps.logp))
        # an answer cut in the source is cut here too, and has no action
        finish = "length" if self.source.errors[turn] == CUT else ""
        return _Answer(ids, logp, self.source.answers[turn], finish)  # type: ignore[arg-type]


FEWEST_DROPPED = 4
"""Minimum number of dropped episodes in a step before `check_dropped` may fail it."""
MOST_NAME_CHARS = 64
"""Maximum length of a tool name that a model made up, in the error that it gets."""


class _Answer(NamedTuple):
    """The tokens of a turn, their log-probabilities in nats, the text, and why it ended."""

    ids: list[int]
    logp: list[float]
    text: str
    finish: str


@dataclass
class _Slot:
    """A running episode."""

    episode: Episode
    conversation: Conversation
    writer: Writer
    """The writer of its cohort."""
    generator: torch.Generator
    fork: Fork | None = None
    """Turns of another episode that it repeats."""
    success: bool | None = None
    """Success as reported by the environment."""
    answer: ParsedAnswer = field(default_factory=ParsedAnswer)
    """Its latest answer."""
    actions: deque[Action] = field(default_factory=deque)
    """Actions of the answer that have not been executed; the first one may be in execution."""
    result: TurnResult | None = None
    """Result of the actions so far; None if nothing was executed."""

    @property
    def repeats(self) -> bool:
        """Whether its next response is given instead of sampled."""
        return self.fork is not None and self.episode.trajectory.turns < self.fork.turns

    @property
    def differs(self) -> bool:
        """Whether a repeated turn went differently from the source."""
        turns = self.episode.trajectory.turns
        if self.fork is None or turns > self.fork.turns or self.episode.ending == "failed":
            return False
        source, own = self.fork.source, self.episode
        # equal observations and rewards up to here; answers are equal because they are copied
        same = own.anchors == source.anchors[: turns + 1] and own.rewards == source.rewards[:turns]
        return bool(own.ending) or not same


class EpisodeRunner:
    """Runs episodes of a policy.

    Args:
        policy: samples the answers.
        pool: its size is the number of episodes that run at once.
        writer: turns observations into prompts.
        actions: how actions are read from answers.
        sampler: sampling of a turn.
        limits: turns of an episode, and size of cohorts.
        bootstrap_observation: whether truncated episodes end with the observation after their last action.
        transcripts: whether episodes keep their conversations for reward functions.
        engine: inference engine that samples with the policy's weights; None samples with the policy itself.
        dynamic: whether all episodes that wait for an answer are sampled together, instead of in cohorts; batches then
            depend on how long the environments take.
    """

    def __init__(
        self,
        policy: VlmPolicy,
        pool: EnvPool,
        writer: Writer,
        actions: ActionConfig,
        sampler: SamplerConfig,
        limits: EpisodeConfig,
        *,
        bootstrap_observation: bool = False,
        transcripts: bool = False,
        engine: EngineSampler | None = None,
        dynamic: bool = False,
    ) -> None:
        self._policy = policy
        self._pool = pool
        self._writer = writer
        self._actions = actions
        self._sampler = sampler
        self._limits = limits
        self._bootstrap_observation = bootstrap_observation
        self._transcripts = transcripts
        self._engine = engine
        self._dynamic = dynamic
        self.total_s = 0.0
        """Seconds of all runs."""
        self.sampling_s = 0.0
        """Seconds of them in which the policy read or wrote tokens."""

    def run(
        self,
        tasks: Sequence[AgentTask],
        seeds: Sequence[int],
        *,
        greedy: bool = False,
        video: Sequence[bool] = (),
        forks: Sequence[Fork | None] = (),
    ) -> list[Episode]:
        """Run an episode of each task.

        Args:
            tasks: N tasks.
            seeds: N seeds of the sampled tokens.
            greedy: whether answers are greedy.
            video: whether each episode is recorded; empty for none.
            forks: what each episode repeats, actions included; empty for nothing.

        Returns:
            N finished episodes.

        Raises:
            UserError: the environment does not repeat what an episode repeats.
        """
        episodes = [Episode(task) for task in tasks]
        for episode, recorded in zip(episodes, video, strict=False):
            episode.video = Video(episode.task.id) if recorded else None
        began = time.perf_counter()
        cohorts = self._cohorts(len(tasks))
        try:
            self._play(cohorts, episodes, seeds, forks, greedy)
        finally:
            # after an error: results of other cohorts are of no use
            self._pool.stop(range(self._pool.size))
        self.total_s += time.perf_counter() - began
        if len(cohorts) > 1:
            share_prompts(episodes)
        return episodes

    def _cohorts(self, count: int) -> list[Cohort[_Slot]]:
        size = None if self._dynamic else self._limits.cohort
        parts = split_cohorts(count, self._pool.size, size)
        return [Cohort(own, rows, lock_step=not self._dynamic) for own, rows in parts]

    def _play(
        self,
        cohorts: Sequence[Cohort[_Slot]],
        episodes: Sequence[Episode],
        seeds: Sequence[int],
        forks: Sequence[Fork | None],
        greedy: bool,
    ) -> None:
        """Run all cohorts to their ends, each in free rows of the pool."""
        waiting, running = deque(cohorts), list[Cohort[_Slot]]()
        free = list(range(self._pool.size))
        while waiting or running:
            while waiting and waiting[0].size <= len(free):
                cohort = waiting.popleft()
                cohort.rows, free = free[: cohort.size], free[cohort.size :]
                # With shared caches, what a pass encodes would depend on which cohort came first.
                cohort.writer = self._writer.fresh()
                cohort.turns = TurnSampler(self._policy, self._sampler, cohort.size, engine=self._engine)
                running.append(cohort)
            due = [cohort for cohort in running if cohort.is_due]
            for cohort in due:
                self._end_turn(cohort)
                self._begin(cohort, episodes, seeds, forks)
                self._take_turn(cohort, greedy)
                # environments of other cohorts get their next actions in between
                self._receive(running, 0.0)
            if not due:
                self._receive(running, math.inf)
            free = sorted([*free, *(row for cohort in running if cohort.is_over for row in cohort.rows)])
            running = [cohort for cohort in running if not cohort.is_over]

    def _receive(self, cohorts: Sequence[Cohort[_Slot]], timeout_s: float) -> None:
        """Take the results that are there, or the next ones."""
        places = {row: (cohort, place) for cohort in cohorts for place, row in enumerate(cohort.rows)}
        with stopwatch("environment"):
            results = self._pool.poll(timeout_s)
        for row, result in results.items():
            cohort, place = places[row]
            if place in cohort.starting:
                cohort.started[place] = result
                cohort.away.remove(place)
            else:
                self._take_result(cohort, place, result)

    def _begin(
        self, cohort: Cohort[_Slot], episodes: Sequence[Episode], seeds: Sequence[int], forks: Sequence[Fork | None]
    ) -> None:
        """Read the first observations that are there, and start environments for free places."""
        started, cohort.started = cohort.started, {}
        new = dict[int, _Slot]()
        for place in sorted(started):
            index = cohort.starting.pop(place)
            conversation = self._start(episodes[index], started[place], cohort.writer, cohort.first)
            if conversation is None:
                self._pool.stop([cohort.rows[place]])
                continue
            # by episode, not by place: which place is free depends on the other episodes
            generator = torch.Generator().manual_seed(seeds[index])
            fork = forks[index] if forks else None
            new[place] = _Slot(episodes[index], conversation, cohort.writer, generator, fork)
        self._check_repeats(new)
        if new:
            self._read_first(new, cohort.turns)
            cohort.running |= new
        # also after episodes that failed at the start, whose places are free
        for place, index in cohort.next_starts().items():
            self._pool.submit(cohort.rows[place], episodes[index].task)

    def _start(
        self,
        episode: Episode,
        result: TurnResult,
        writer: Writer,
        first: dict[str, tuple[Observation, Prompt]],
    ) -> Conversation | None:
        """Start the conversation of an episode; None if the episode is already over."""
        if result.failure is not None or result.over:
            reason = "it was over before it began" if result.failure is None else result.failure.reason
            episode.ending = "failed"
            episode.reason = reason
            return None
        known = first.get(episode.task.id)
        # Equal first observations share one prompt object, so that it is read once.
        shared = known[1] if known is not None and _equal_observations(known[0], result.observation) else None
        try:
            conversation = writer.begin(episode.task, result.observation, shared)
        except TaskError as error:
            note_overflow(episode, error)
            return None
        episode.prompt = conversation.parts[0].prompt
        episode.last = result.observation
        episode.anchors.append(number_observation(result.observation, result.info))
        first.setdefault(episode.task.id, (result.observation, episode.prompt))
        return conversation

    def _read_first(self, slots: dict[int, _Slot], turns: TurnSampler) -> None:
        """Read the first prompts, each object once."""
        prompts = {row: slot.conversation.parts[0].prompt for row, slot in slots.items()}
        # by identity: `_start` gives equal first observations one object
        distinct = {id(prompt): prompt for prompt in prompts.values()}
        index = {key: number for number, key in enumerate(distinct)}
        rows = _rows(slots)
        with self._sampling("prefill"):
            which = torch.tensor([index[id(prompts[row])] for row in rows.tolist()])
            turns.begin(rows, list(distinct.values()), which)

    def _take_turn(self, cohort: Cohort[_Slot], greedy: bool) -> None:
        """Sample an answer of each episode that waits for one, and send its first action."""
        ready, began = cohort.ready(), time.perf_counter()
        if not ready:
            return
        answers, seconds = self._answers(ready, cohort.turns, greedy), time.perf_counter() - began
        for place in sorted(ready):
            slot = ready[place]
            slot.answer, slot.result = self._note(slot, answers[place], seconds), None
            slot.actions = deque(slot.answer.actions)
            self._act(cohort, place)

    def _act(self, cohort: Cohort[_Slot], place: int) -> None:
        """Send the next action of an answer, if there is one."""
        slot = cohort.running[place]
        if slot.actions:
            cohort.away.add(place)
            self._pool.submit(cohort.rows[place], slot.actions[0])
        else:
            cohort.away.discard(place)
            cohort.acted.add(place)

    def _take_result(self, cohort: Cohort[_Slot], place: int, result: TurnResult) -> None:
        """Keep the result of an action and go on with the next one."""
        slot = cohort.running[place]
        action = slot.actions.popleft()
        self._record(slot, action, result)
        if self._writer.tools:
            # the agent sees what each of its calls returned, not just the last
            result = _with_earlier(slot.result, _with_name(action, result))
        slot.result = result
        if result.over:
            # actions after the end of an episode are not executed
            slot.actions.clear()
        self._act(cohort, place)

    def _end_turn(self, cohort: Cohort[_Slot]) -> None:
        """Append the observations after the actions, and end the episodes that are over."""
        acted, cohort.acted = sorted(cohort.acted), set()
        if not acted:
            return
        turns, running = cohort.turns, {place: cohort.running[place] for place in acted}
        parsed = {place: slot.answer for place, slot in running.items()}
        results = {place: slot.result for place, slot in running.items() if slot.result is not None}
        over = [place for place in acted if self._is_over(running[place], parsed[place], results.get(place))]
        # Before the rows are dropped from `turns`, which knows how much room they have left.
        if self._bootstrap_observation:
            self._add_bootstrap_observations({place: running[place] for place in over}, parsed, results, turns)
        # Ended episodes are left out, so that no observation is read that nobody answers.
        active = {place: slot for place, slot in running.items() if place not in over}
        over += self._observe(active, parsed, results, turns)
        self._check_repeats(running)
        self._pool.stop([cohort.rows[place] for place in over])
        turns.drop(torch.tensor(sorted(over), dtype=torch.int64))
        for place in over:
            slot = cohort.running.pop(place)
            self._end(slot)

    def _end(self, slot: _Slot) -> None:
        """Set the success of an episode that is over, and complete its video and transcript."""
        episode = slot.episode
        if not episode.has_result:
            return
        above = episode.total > self._limits.success_above
        reported = above if slot.success is None else slot.success
        # Where nobody asked for the verdict, a solved screen that was not paid is no success.
        episode.success = reported and (above or episode.ending not in ("unreadable", "cut"))
        if episode.video is not None:
            episode.video.end(episode.last, episode.total, episode.success)
        if self._transcripts:
            last = None if slot.result is None else slot.result.observation
            episode.transcript = self._writer.transcript(slot.conversation, episode.answers, last)

    def _answers(self, running: dict[int, _Slot], turns: TurnSampler, greedy: bool) -> dict[int, _Answer]:
        """The answer of each row: copied from the fork's source in repeated turns, sampled otherwise."""
        answers = {
            row: slot.fork.answer(slot.episode.trajectory.turns)
            for row, slot in running.items()
            if slot.fork and slot.repeats
        }
        for row, answer in answers.items():
            # The sampler has to read a given answer like its own, or the next turn would lack it.
            turns.give(row, answer.ids)
        asked = {row: slot for row, slot in running.items() if row not in answers}
        if asked:
            # Always the full width: a turn's random numbers must not depend on the lengths of earlier answers.
            width = self._sampler.max_new_tokens
            uniforms = [torch.rand(width, generator=asked[row].generator) for row in sorted(asked) if not greedy]
            with self._sampling("decode"):
                drawn = turns.sample(_rows(asked), torch.stack(uniforms) if uniforms else None)
            answers |= {row: _answer(drawn, index) for index, row in enumerate(sorted(asked))}
        return answers

    def _check_repeats(self, slots: dict[int, _Slot]) -> None:
        for slot in slots.values():
            if slot.differs:
                raise UserError(
                    f"{self._pool.factory} is not reproducible: with the task, seed and actions of an earlier "
                    f"episode, {slot.episode.task.id} went differently by turn {slot.episode.trajectory.turns}. "
                    "Episodes can only branch if observations and rewards depend on nothing else"
                )

    def _note(self, slot: _Slot, answer: _Answer, seconds: float) -> ParsedAnswer:
        """Keep an answer, which took some seconds, and read its actions."""
        episode = slot.episode
        episode.trajectory.add_turn(answer.ids, answer.logp)
        episode.answers.append(answer.text)
        # 0 even without an action: rewards has an entry per turn, and _record adds to the last one.
        episode.rewards.append(0.0)
        episode.seconds.append(seconds)
        episode.finish = answer.finish
        self._writer.answer(slot.conversation, answer.ids)
        parsed = self._writer.parse(slot.conversation, self._actions, answer.ids, answer.text, answer.finish)
        episode.errors.append(parsed.error or "")
        return parsed

    def _record(self, slot: _Slot, action: Action, result: TurnResult) -> None:
        episode = slot.episode
        if episode.video is not None:
            episode.video.add(episode.last, str(action), result.info)
        if result.failure is not None:
            episode.ending = "failed"
            episode.reason = f"{result.failure.kind}: {result.failure.reason}"
            return
        episode.rewards[-1] += result.reward
        episode.seconds[-1] += result.seconds
        episode.refused += "action_error" in result.info
        episode.calls += count_calls(action)
        episode.actions.append(_digest(action))
        episode.step_seconds.append(result.seconds)
        if TOOL_ERROR in result.info:
            kind = str(result.info[TOOL_ERROR])
            episode.tool_errors[kind] = episode.tool_errors.get(kind, 0) + 1
        episode.last = result.observation
        episode.final_answer = str(action.arguments.get("answer", ""))
        # An environment may report success in some turns only; the latest report holds.
        slot.success = result.info.get("success", slot.success)

    def _is_over(self, slot: _Slot, answer: ParsedAnswer, result: TurnResult | None) -> bool:
        """Set how the episode ended, if it did in this turn."""
        episode = slot.episode
        # _record has already ended it as failed, which no other ending may replace
        if episode.ending:
            return True
        if answer.error is not None and self._actions.after_error == "terminate":
            episode.ending = "cut" if answer.error == CUT else "unreadable"
            episode.reason = answer.detail
        elif result is not None and result.terminated:
            episode.ending = "terminated"
        elif self._actions.after_error == "reply" and episode.invalid_streak >= self._actions.max_invalid:
            episode.ending = "unreadable"
            episode.reason = f"{episode.invalid_streak} turns in a row had an error: {answer.detail}"
        # `terminated` wins over a limit that is reached in the same turn: there is nothing left to bootstrap
        elif (result is not None and result.truncated) or episode.trajectory.turns >= self._limits.max_turns:
            episode.ending = "truncated"
        return bool(episode.ending)

    def _observe(
        self,
        active: dict[int, _Slot],
        parsed: dict[int, ParsedAnswer],
        results: dict[int, TurnResult],
        turns: TurnSampler,
    ) -> list[int]:
        """Append the resulting observations; returns the rows whose conversation no longer fits into the model."""
        added = dict[int, Prompt]()
        restarted = dict[int, Prompt]()
        full = []
        for (row, slot), room in zip(sorted(active.items()), self._room(active, turns), strict=True):
            episode, result = slot.episode, results.get(row)
            try:
                prompt, restarts, left = self._next_prompt(slot, parsed[row], result, room)
            except TaskError as error:
                note_overflow(episode, error, self._limits.overflow.result)
                full.append(row)
                continue
            if left < self._sampler.max_new_tokens:
                note_overflow(episode, _too_long(episode), self._limits.overflow.result)
                # what the last action led to can still be read, and valued
                if self._bootstrap_observation and episode.has_result and left > 0:
                    episode.trajectory.add_bootstrap_observation(prompt, restarts)
                full.append(row)
                continue
            episode.trajectory.restart(prompt) if restarts else episode.trajectory.add_given(prompt)
            # an answer without an action leaves the environment as it was
            same = episode.anchors[-1]
            episode.anchors.append(same if result is None else number_observation(result.observation, result.info))
            (restarted if restarts else added)[row] = prompt
        with self._sampling("prefill"):
            if added:
                turns.extend(_rows(added), list(added.values()))
            if restarted:
                rows = _rows(restarted)
                turns.begin(rows, list(restarted.values()), torch.arange(len(rows)))
        return full

    def _add_bootstrap_observations(
        self,
        over: dict[int, _Slot],
        parsed: dict[int, ParsedAnswer],
        results: dict[int, TurnResult],
        turns: TurnSampler,
    ) -> None:
        """Append the last observation to truncated episodes, if it fits into the model's positions."""
        truncated = {row: slot for row, slot in over.items() if slot.episode.ending == "truncated"}
        for (row, slot), room in zip(sorted(truncated.items()), self._room(truncated, turns), strict=True):
            try:
                prompt, restarts, left = self._next_prompt(slot, parsed[row], results.get(row), room)
            except TaskError as error:
                # on a copy: the episode has a result, and lacks only the critic's value after it
                note_overflow(replace(slot.episode), error)
                continue
            # one position for the token before which the critic is asked
            if left > 0:
                slot.episode.trajectory.add_bootstrap_observation(prompt, restarts)

    def _next_prompt(
        self, slot: _Slot, answer: ParsedAnswer, result: TurnResult | None, room: int
    ) -> tuple[Prompt, bool, int]:
        """The next observation, whether it restarts the conversation, and the positions left after it.

        Raises:
            TaskError: it cannot be encoded, or alone exceeds all positions.
        """
        # an answer without action changes nothing, so the note alone follows
        observation = Observation() if result is None else result.observation
        if answer.calls:
            observation = _with_errors(observation, answer.calls)
        part = slot.writer.follow(slot.conversation, observation, answer.note)
        cut = slot.writer.cut(slot.conversation)
        # a restarted conversation begins with all positions
        return (part, False, room - len(part)) if cut is None else (cut, True, self._policy.positions - len(cut))

    @contextlib.contextmanager
    def _sampling(self, stage: str) -> Iterator[None]:
        """Add the seconds inside to a stage of the step and to those of sampling."""
        began = time.perf_counter()
        with stopwatch(stage):
            yield
        self.sampling_s += time.perf_counter() - began

    def _room(self, slots: dict[int, _Slot], turns: TurnSampler) -> list[int]:
        """Positions left in each row, in order."""
        return turns.room(_rows(slots)) if slots else []


def _too_long(episode: Episode) -> TaskError:
    turn = episode.trajectory.turns + 1
    return TaskError("prompt_too_long", episode.task.id, f"turn {turn} does not fit in the model's context")


def note_overflow(episode: Episode, error: TaskError, result: str = "failed") -> None:
    """End an episode before a turn that does not fit, with a value of `episode.overflow.result`.

    One with an image that the model cannot read has no result.

    Raises:
        UserError: the turn cannot be written for another reason.
    """
    if error.kind in ("unusable_image", "unreadable_image"):
        episode.ending, episode.reason = "failed", f"{error.kind}: {one_line(str(error))}"
        return
    if error.kind != "prompt_too_long":
        raise UserError(
            f"{error.place}: a turn of the episode cannot be encoded for the model: {error.message}"
        ) from error
    episode.ending = "truncated" if result == "truncated" else "overflow"
    episode.overflows = True
    episode.reason = str(error)


def check_dropped(episodes: Sequence[Episode]) -> None:
    """Reject a step whose longer episodes were all dropped, because training would only see the short ones.

    Raises:
        UserError: a quarter of the episodes or more overflowed, and none with a result went on for as long.
    """
    dropped = [episode for episode in episodes if episode.ending == "overflow"]
    if len(dropped) < max(FEWEST_DROPPED, len(episodes) / 4):
        return
    turns = min(episode.trajectory.turns for episode in dropped)
    if any(episode.has_result and episode.trajectory.turns > turns for episode in episodes):
        return
    raise UserError(
        f"every episode that went beyond turn {turns} was dropped, {len(dropped)} of {len(episodes)} in this step: "
        f"{dropped[0].reason}; training would only see the shorter ones. Shorten observations and responses, keep "
        "fewer images (conversation.history_images), set episode.max_turns so that all turns fit, or use a model "
        "with a longer context"
    )


def _rows(slots: dict[int, _Slot] | dict[int, Prompt]) -> Tensor:
    return torch.tensor(sorted(slots), dtype=torch.int64)


def _answer(drawn: Samples, index: int) -> _Answer:
    length = int(drawn.mask[index].sum())
    ids, logp = (column[index, :length].tolist() for column in (drawn.response_ids, drawn.logp))
    return _Answer(ids, logp, drawn.texts[index], drawn.finish[index])


def _digest(action: Action) -> str:
    """Equal for equal names and arguments, in every process."""
    return blake2b(str(action).encode(errors="surrogatepass"), digest_size=6).hexdigest()


def _with_earlier(earlier: TurnResult | None, result: TurnResult) -> TurnResult:
    """A result that also shows what the calls before it in the same answer returned."""
    if earlier is None:
        return result
    text = "\n".join(filter(None, (earlier.observation.text, result.observation.text)))
    images = earlier.observation.images + result.observation.images
    named = earlier.observation.results + result.observation.results
    return replace(result, observation=Observation(text, images, named))


def _with_name(action: Action, result: TurnResult) -> TurnResult:
    """A result with the tool that was called; what was said is no call."""
    seen = result.observation
    if action.name == SAY or result.failure is not None:
        return result
    named = (CallResult(action.name, seen.text, len(seen.images)),)
    return replace(result, observation=replace(seen, results=named))


def _with_errors(seen: Observation, calls: Sequence[ToolCall]) -> Observation:
    """The results of executed calls, and errors as the results of the others, in the order of the calls."""
    executed, results = iter(seen.results), list[CallResult]()
    for call in calls:
        if call.status != OK:
            # a name that the model made up may contain control tokens
            name = re.sub(r"[^\w.-]", "_", call.name)[:MOST_NAME_CHARS] or "unknown"
            results.append(CallResult(name, f"Error: {call.detail}.", 0, call.id))
        # calls after the end of an episode have no result
        elif (result := next(executed, None)) is not None:
            results.append(replace(result, call_id=call.id))
    text = "\n".join(result.text for result in results if result.text)
    return replace(seen, text=text, results=tuple(results))


def _equal_observations(one: Observation, other: Observation) -> bool:
    if (one.text, one.request) != (other.text, other.request) or len(one.images) != len(other.images):
        return False
    return all(np.array_equal(a, b) for a, b in zip(one.images, other.images, strict=True))
