"""Episodes of an agent: environments and conversations side by side, sampled together turn by turn.

An episode takes a slot of the pool of environments; where there are more episodes than slots the next one begins when
another is over. The random numbers of an episode are its own, so that it does not depend on what runs beside it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmrl.agents.actions import Action, ActionConfig, ParsedAnswer
from mmrl.agents.conversation import Conversation, Writer
from mmrl.agents.env_pool import EnvPool, TurnResult
from mmrl.agents.environment import Observation
from mmrl.agents.episode import Episode, EpisodeConfig
from mmrl.agents.films import Film
from mmrl.agents.tasks import AgentTask
from mmrl.agents.turn_sampler import TurnSampler
from mmrl.training.record.stopwatch import stopwatch
from mmrl.vlm.payload import Prompt
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.sampling import SamplerConfig, Samples
from mmrl.vlm.task import TaskError

FINISH = "finish"
"""Action that asks an environment for its verdict, where it has such an action."""


@dataclass
class _Slot:
    """An episode that runs."""

    row: int
    episode: Episode
    conversation: Conversation
    generator: torch.Generator
    said: bool | None = None
    """What the environment said of success."""


class EpisodeRunner:
    """Runs episodes of a policy."""

    def __init__(
        self,
        policy: VlmPolicy,
        pool: EnvPool,
        writer: Writer,
        actions: ActionConfig,
        sampler: SamplerConfig,
        limits: EpisodeConfig,
        *,
        reread: bool = False,
        outlook: bool = False,
    ) -> None:
        self._policy, self._pool, self._writer = policy, pool, writer
        self._actions, self._sampler, self._limits, self._reread = actions, sampler, limits, reread
        self._outlook = outlook

    def run(
        self, tasks: Sequence[AgentTask], seeds: Sequence[int], *, greedy: bool = False, film: Sequence[bool] = ()
    ) -> list[Episode]:
        """Run an episode of each task."""
        episodes = [Episode(task) for task in tasks]
        for number, wanted in enumerate(film):
            episodes[number].film = Film(tasks[number].id) if wanted else None
        turns = TurnSampler(self._policy, self._sampler, self._pool.size, reread=self._reread)
        waiting, running, known = deque(range(len(tasks))), dict[int, _Slot](), dict[str, tuple[Observation, Prompt]]()
        while waiting or running:
            self._fill(waiting, running, episodes, seeds, known, turns)
            if running:
                self._take_turn(running, turns, greedy)
        return episodes

    def _fill(
        self,
        waiting: deque[int],
        running: dict[int, _Slot],
        episodes: list[Episode],
        seeds: Sequence[int],
        known: dict[str, tuple[Observation, Prompt]],
        turns: TurnSampler,
    ) -> None:
        """Begin episodes in the free slots."""
        while waiting and len(running) < self._pool.size:
            free = [slot for slot in range(self._pool.size) if slot not in running][: len(waiting)]
            rows = {slot: waiting.popleft() for slot in free}
            with stopwatch("environment"):
                results = self._pool.reset({slot: episodes[row].task for slot, row in rows.items()})
            begun = {}
            for slot, result in results.items():
                started = self._begin(rows[slot], episodes[rows[slot]], result, seeds[rows[slot]], known)
                if started is not None:
                    begun[slot] = started
                elif slot in self._pool.live:
                    self._pool.stop([slot])
            if begun:
                self._read_first(begun, turns)
                running |= begun

    def _begin(
        self, row: int, episode: Episode, result: TurnResult, seed: int, known: dict[str, tuple[Observation, Prompt]]
    ) -> _Slot | None:
        if result.failure is not None or result.over:
            reason = "it is over before it began" if result.failure is None else result.failure.reason
            episode.ending, episode.reason = "failed", reason
            return None
        seen = result.observation
        found = known.get(episode.task.id)
        same = found[1] if found is not None and _same(found[0], seen) else None  # one object, so that it is read once
        try:
            conversation = self._writer.begin(episode.task, seen, same)
        except TaskError as error:
            episode.ending, episode.reason = "overflow", str(error)
            return None
        episode.prompt, episode.last = conversation.parts[0].prompt, seen
        known.setdefault(episode.task.id, (seen, episode.prompt))
        return _Slot(row, episode, conversation, torch.Generator().manual_seed(seed))

    def _read_first(self, begun: dict[int, _Slot], turns: TurnSampler) -> None:
        prompts: dict[int, Prompt] = {}
        for slot in begun.values():
            assert slot.episode.prompt is not None
            prompts.setdefault(id(slot.episode.prompt), slot.episode.prompt)
        place = {key: number for number, key in enumerate(prompts)}
        rows = self._rows(begun)
        which = [place[id(begun[row].episode.prompt)] for row in rows.tolist()]
        with stopwatch("prefill"):
            turns.begin(rows, list(prompts.values()), torch.tensor(which, device=rows.device))

    def _take_turn(self, running: dict[int, _Slot], turns: TurnSampler, greedy: bool) -> None:
        """One answer and one step of every running episode."""
        rows = self._rows(running)
        with stopwatch("decode"):
            drawn = turns.sample(rows, None if greedy else self._uniforms(running, rows))
        parsed = {row: self._note(running[row], drawn, place) for place, row in enumerate(rows.tolist())}
        with stopwatch("environment"):
            results = self._act(running, parsed)
        over = [row for row in rows.tolist() if self._settle(running[row], parsed[row], results.get(row))]
        if self._outlook:
            self._look_ahead({row: running[row] for row in over}, parsed, results, turns)
        going_on = {row: slot for row, slot in running.items() if row not in over}
        over += self._show(going_on, parsed, results, turns)
        self._pool.stop(over)
        turns.drop(torch.tensor(sorted(over), dtype=torch.int64, device=rows.device))
        for row in over:
            slot = running.pop(row)
            _close(slot, self._limits.success_above)

    def _uniforms(self, running: dict[int, _Slot], rows: Tensor) -> Tensor:
        width = self._sampler.max_new_tokens
        return torch.stack([torch.rand(width, generator=running[row].generator) for row in rows.tolist()])

    def _note(self, slot: _Slot, drawn: Samples, place: int) -> ParsedAnswer:
        """Keep an answer and read its actions."""
        length = int(drawn.mask[place].sum())
        ids = drawn.response_ids[place, :length].tolist()
        slot.episode.trajectory.add_turn(ids, drawn.logp[place, :length].tolist())
        slot.episode.answers.append(drawn.texts[place])
        slot.episode.rewards.append(0.0)
        slot.episode.finish = drawn.finish[place]
        self._writer.answer(slot.conversation, ids)
        parsed = self._actions.parse(drawn.texts[place])
        slot.episode.unreadable += parsed.error is not None
        return parsed

    def _act(self, running: dict[int, _Slot], parsed: dict[int, ParsedAnswer]) -> dict[int, TurnResult]:
        """Execute the actions of all answers, those of one answer in turn; the last result of each row counts."""
        results: dict[int, TurnResult] = {}
        queues = {row: deque(self._actions_of(answer)) for row, answer in parsed.items()}
        while any(queues.values()):
            now = {row: queue.popleft() for row, queue in queues.items() if queue}
            found = self._pool.step(now)
            for row, result in found.items():
                self._record(running[row], now[row], result)
                results[row] = result
                if result.over:
                    queues[row].clear()
        return results

    def _actions_of(self, answer: ParsedAnswer) -> tuple[Action, ...]:
        if answer.error is None:
            return answer.actions
        ends = self._actions.on_parse_error == "terminate" and FINISH in self._pool.actions
        return (Action(FINISH),) if ends else ()

    def _record(self, slot: _Slot, action: Action, result: TurnResult) -> None:
        episode = slot.episode
        if episode.film is not None:
            episode.film.add(episode.last, _caption(action), result.info)
        if result.failure is not None:
            episode.ending, episode.reason = "failed", f"{result.failure.kind}: {result.failure.reason}"
            return
        episode.rewards[-1] += result.reward
        episode.refused += "action_error" in result.info
        episode.last = result.observation
        if isinstance(result.info.get("success"), bool):
            slot.said = result.info["success"]

    def _settle(self, slot: _Slot, answer: ParsedAnswer, result: TurnResult | None) -> bool:
        """Whether the episode is over with this turn."""
        episode = slot.episode
        if episode.ending:
            return True
        if answer.error is not None and self._actions.on_parse_error == "terminate":
            episode.ending, episode.reason = "unreadable", answer.detail
        elif result is not None and result.terminated:
            episode.ending = "terminated"
        elif (result is not None and result.truncated) or episode.trajectory.turns >= self._limits.max_turns:
            episode.ending = "truncated"
        return bool(episode.ending)

    def _show(
        self,
        going_on: dict[int, _Slot],
        parsed: dict[int, ParsedAnswer],
        results: dict[int, TurnResult],
        turns: TurnSampler,
    ) -> list[int]:
        """Let the agents see what came of it; returns those whose conversation does not fit into the model any more."""
        added: dict[int, Prompt] = {}
        anew: dict[int, Prompt] = {}
        room = dict(zip(going_on, turns.room(self._rows(going_on)), strict=True)) if going_on else {}
        full = []
        for row, slot in sorted(going_on.items()):
            try:
                part, cut = self._next_part(slot, parsed[row], results.get(row))
            except TaskError as error:
                slot.episode.ending, slot.episode.reason = "overflow", str(error)
                full.append(row)
                continue
            left = room[row] - len(part) if cut is None else self._policy.positions - len(cut)
            if left < 1:
                slot.episode.ending = "overflow"
                slot.episode.reason = (
                    f"turn {slot.episode.trajectory.turns + 1} does not fit into the model's positions"
                )
                full.append(row)
            elif cut is None:
                slot.episode.trajectory.add_given(part)
                added[row] = part
            else:
                slot.episode.trajectory.restart(cut)
                anew[row] = cut
        with stopwatch("prefill"):
            if added:
                turns.extend(self._rows(added), list(added.values()))
            if anew:
                rows = self._rows(anew)
                turns.begin(rows, list(anew.values()), torch.arange(len(rows), device=rows.device))
        return full

    def _look_ahead(
        self,
        over: dict[int, _Slot],
        parsed: dict[int, ParsedAnswer],
        results: dict[int, TurnResult],
        turns: TurnSampler,
    ) -> None:
        """Append to truncated episodes what was seen last, where it fits into the model's positions."""
        cut_off = {row: slot for row, slot in over.items() if slot.episode.ending == "truncated"}
        room = dict(zip(cut_off, turns.room(self._rows(cut_off)), strict=True)) if cut_off else {}
        for row, slot in sorted(cut_off.items()):
            with contextlib.suppress(TaskError):
                part, cut = self._next_part(slot, parsed[row], results.get(row))
                left = room[row] - len(part) if cut is None else self._policy.positions - len(cut)
                if left >= 1:
                    slot.episode.trajectory.end_in(part if cut is None else cut, anew=cut is not None)

    def _next_part(self, slot: _Slot, answer: ParsedAnswer, result: TurnResult | None) -> tuple[Prompt, Prompt | None]:
        note = "" if answer.error is None else f"The answer could not be read: {answer.detail}."
        seen = Observation() if result is None else result.observation
        part = self._writer.follow(slot.conversation, seen, note)
        return part, self._writer.cut(slot.conversation)

    def _rows(self, slots: dict[int, _Slot] | dict[int, Prompt]) -> Tensor:
        return torch.tensor(sorted(slots), dtype=torch.int64, device=self._policy.device)


def _close(slot: _Slot, success_above: float) -> None:
    episode = slot.episode
    if episode.has_result:
        episode.success = episode.total > success_above if slot.said is None else slot.said
        if episode.film is not None:
            episode.film.end(episode.last, episode.total, episode.success)


def _same(one: Observation, other: Observation) -> bool:
    if one.text != other.text or len(one.images) != len(other.images):
        return False
    return all(np.array_equal(a, b) for a, b in zip(one.images, other.images, strict=True))


def _caption(action: Action) -> str:
    return f"{action.name}({', '.join(f'{name}={value!r}' for name, value in action.arguments.items())})"
