"""Counts and metrics of a step's episodes, alarms, and reward functions of whole episodes.

A policy that finds out that silence pays stops acting, and its reward keeps rising. That shows in the fraction of
responses without an executed action, and earlier in episodes that earned less than one without any action.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.environments.environment import CUT, NATIVE
from mmrl.agents.rollout.episodes import Episode
from mmrl.core.payload import to_device
from mmrl.errors import UserError
from mmrl.rewards import RewardConfig, RewardResult, RewardSum, TrainerState
from mmrl.rewards.sum import IMAGES, reward_columns, tell_renamed
from mmrl.runs.run_log import STEPS, WINDOW, Alarm, Track

OWN_TERMS = ("environment", "format", "invalid_turn", "overflow")
"""Reward terms that every agent's recipe has."""
GIVEN = ("completion_ids", "completion_lengths", "environment_reward", "success", "final_answer")
"""Columns of episodes that the run passes to reward functions besides the entries of the tasks."""


def check_names(configs: Sequence[RewardConfig]) -> None:
    """Reject reward names that the recipe itself uses; raises ValueError."""
    taken = next((config.name for config in configs if config.name in OWN_TERMS), None)
    if taken is not None:
        raise ValueError(
            f"a reward has the name '{taken}', which the recipe's own term uses; give it another name and set "
            f"function: {taken}, or use reward.{taken}"
        )


def tabulate_failed_answers(episodes: Sequence[Episode], like: Tensor) -> Tensor:
    """(B, T), 1 at the last token of each response that executed nothing, in episodes with a result."""
    return _tabulate_turns([[bool(error) for error in episode.errors] for episode in episodes], episodes, like)


def tabulate_penalties(episodes: Sequence[Episode], config: Any, like: Tensor) -> dict[str, Tensor]:
    """Rewards (B, T) of invalid turns and of overflows, each at the last token of its turn; only those that are set."""
    found = {}
    if each := config.reward.invalid_turn:
        invalid = [[error not in ("", CUT) for error in episode.errors] for episode in episodes]
        found["invalid_turn"] = each * _tabulate_turns(invalid, episodes, like)
    if each := config.episode.overflow.reward:
        last = [[False] * (episode.trajectory.turns - 1) + [episode.overflows] for episode in episodes]
        found["overflow"] = each * _tabulate_turns(last, episodes, like)
    return found


def _tabulate_turns(marks: Sequence[Sequence[bool]], episodes: Sequence[Episode], like: Tensor) -> Tensor:
    """(B, T), 1 at the last token of each marked turn, in episodes with a result."""
    table = torch.zeros(like.shape, dtype=like.dtype)
    for row, (own, episode) in enumerate(zip(marks, episodes, strict=True)):
        ends = zip(episode.trajectory.last_tokens(), own, strict=False)
        table[row, [end for end, marked in ends if marked and episode.has_result]] = 1.0
    return to_device(table, like.device)


class EpisodeRewards:
    """Scores finished episodes; functions may need entries of the tasks, which are by the configuration's key."""

    def __init__(self, configs: Sequence[RewardConfig], tasks: Mapping[str, Sequence[AgentTask]]) -> None:
        self._sum = RewardSum(configs)
        self.names = [config.name for config in configs]
        try:
            for key, own in tasks.items() if configs else ():
                try:
                    self._sum.check_columns([*_columns([Episode(task) for task in own]), IMAGES])
                    tell_renamed(key, _names(own), GIVEN)
                except UserError as error:
                    raise UserError(f"{key}: {error}") from None
        except UserError:
            self.close()
            raise

    def score(self, episodes: Sequence[Episode], state: TrainerState) -> RewardResult | None:
        """Add the scores to the episodes that have a result; returns None if there is nothing to score."""
        found = [episode for episode in episodes if episode.transcript is not None]
        if not found:
            return None
        transcripts = [episode.transcript for episode in found if episode.transcript is not None]
        columns = _columns(found)
        if self._sum.reads_images:
            columns[IMAGES] = [[Image.fromarray(image) for image in own.images] for own in transcripts]
        result = self._sum.score(
            [own.prompt for own in transcripts], [own.completion for own in transcripts], columns, state
        )
        for number, episode in enumerate(found):
            episode.added_reward = result.total[number]
            episode.terms = {name: values[number] for name, values in result.terms.items()}
            episode.transcript = None  # its images take much memory
        return result

    def close(self) -> None:
        """Stop the worker processes."""
        self._sum.close()


def episode_return(
    prompts: Sequence[Any], completions: Sequence[Any], environment_reward: Sequence[float], **columns: Any
) -> list[float]:
    """The environment's reward of each episode as a reward term, for example with `shuffle` as a control."""
    return list(environment_reward)


def _columns(episodes: Sequence[Episode]) -> dict[str, list[Any]]:
    """The entries of the tasks, the tokens that the agent wrote, and what the environment gave."""
    tokens = [episode.trajectory.sampled_ids for episode in episodes]
    own: tuple[list[Any], ...] = (
        tokens,
        [len(ids) for ids in tokens],
        [episode.total for episode in episodes],
        [episode.success for episode in episodes],
        [episode.final_answer for episode in episodes],
    )
    given = dict(zip(GIVEN, own, strict=True))
    passed = reward_columns(_names(episode.task for episode in episodes), given)
    return {other: [episode.task.task.get(name) for episode in episodes] for name, other in passed.items()} | given


def _names(tasks: Iterable[AgentTask]) -> list[str]:
    return sorted({name for task in tasks for name in task.task})


NEARLY_ALL = 0.95
"""Alarm threshold: fraction of actions that are one and the same."""
OFTEN = 0.5
"""Alarm threshold: fraction of responses without an effect."""
LITTLE = 0.1
"""Alarm threshold for a fraction that has doubled; also the remaining fraction of tool calls and entropy below which an
alarm is raised."""
ACTION, SECONDS = "action/", "step_seconds/"
"""Starts of the names of counts: of each action, and of actions by the seconds that they took."""
BY_ANSWER = ("unreadable", "empty", "cut", "refused", "calls")
"""Counts that are logged per response."""


def count_episodes(seen: Counter[str], episodes: Sequence[Episode]) -> None:
    """Add the counts of finished episodes; for episodes without a result, how they ended."""
    # a broken environment says nothing about the policy, so its episodes enter no rate
    sound = [episode for episode in episodes if episode.has_result]
    errors = Counter(error for episode in sound for error in episode.errors)
    seen["results"] += len(sound)
    seen["success"] += sum(episode.success for episode in sound)
    seen["return"] += sum(episode.total for episode in sound)  # type: ignore[assignment]
    seen["turns"] += sum(episode.trajectory.turns for episode in sound)
    seen["answers"] += sum(len(episode.answers) for episode in sound)
    seen["unreadable"] += sum(episode.unreadable for episode in sound)
    seen["empty"] += errors["empty"]
    seen["cut"] += errors[CUT]
    seen["refused"] += sum(episode.refused for episode in sound)
    seen["calls"] += sum(episode.calls for episode in sound)
    for episode in sound:
        seen.update({f"tool_errors/{kind}": count for kind, count in episode.tool_errors.items()})
        seen.update(f"{ACTION}{digest}" for digest in episode.actions)
        # two digits, so that processes can add up their counts
        seen.update(f"{SECONDS}{seconds:.1e}" for seconds in episode.step_seconds)
    seen["failed"] += sum(episode.ending == "failed" for episode in episodes)
    seen["overflow"] += sum(episode.overflows for episode in episodes)


def count_below_silence(seen: Counter[str], episodes: Sequence[Episode], config: Any) -> None:
    """Add the episodes in which every response acted but that earned less than an episode without a single action."""
    silence = silent_return(config)
    for episode in episodes:
        acted = episode.has_result and not any(episode.errors)
        # only the environment's part: format penalties are what silence pays itself
        seen["below_silence"] += acted and config.reward.environment * episode.total < silence


def silent_return(config: Any) -> float:
    """Reward of an episode in which no response is executed: its environment takes no step."""
    # the first unreadable answer ends the episode, else each turn has one
    answers = {"terminate": 1, "reply": min(config.actions.max_invalid, config.episode.max_turns)}.get(
        config.actions.after_error, config.episode.max_turns
    )
    # avoids -0.0 in the message
    return 0.0 - (config.reward.format - config.reward.invalid_turn) * answers


def episode_metrics(seen: Mapping[str, float]) -> dict[str, float]:
    """Metrics of counts over all processes."""
    # no result at all: NaN, which the log shows as missing
    results, answers = seen.get("results", 0) or math.nan, seen.get("answers", 0) or math.nan
    found = {f"episode/{name}": seen.get(name, 0) / results for name in ("success", "return", "turns", "below_silence")}
    if total := seen.get("rollout_s"):
        found["sampler/idle"] = seen.get("idle_s", 0) / total
    kinds = [name for name in seen if name.startswith("tool_errors/")]
    found |= {f"episode/{name}": seen.get(name, 0) / answers for name in (*BY_ANSWER, *sorted(kinds))}
    actions = [count for name, count in seen.items() if name.startswith(ACTION)]
    if actions:
        found["episode/top_action"] = max(actions) / sum(actions)
    seconds = sorted((float(name.removeprefix(SECONDS)), n) for name, n in seen.items() if name.startswith(SECONDS))
    return found | {f"time/env_step_p{q}": _percentile(seconds, q) for q in (50, 90) if seconds}


def _percentile(values: Sequence[tuple[float, float]], q: int) -> float:
    """The smallest of some counted values that at least q per cent do not exceed, as of ascending (value, count)."""
    total, below = sum(count for _, count in values), 0.0
    for value, count in values:
        below += count
        if 100 * below >= q * total:
            return value
    raise ValueError("there are no values")


def agent_alarms(config: Any, *, program: bool = False) -> dict[str, Alarm]:
    """The alarms of a run that samples episodes, by kind; `program` if the environment is an agent program.

    A program gets each response as text and decides what follows, so there is no action to refuse, and no silence.
    """
    answers = ("episode/unreadable", "episode/empty", "episode/below_silence")
    found = {
        "silence_pays": Alarm((*answers, "episode/cut"), partial(_silence_pays, config)),
        "unreadable": Alarm(answers, partial(_often_unreadable, config)),
        "more_unreadable": Alarm(answers, partial(_more_unreadable, config)),
        "cut": Alarm(("episode/cut",), partial(_often_cut, config, program)),
        "refused": Alarm(("episode/refused",), partial(_often_refused, config)),
        "no_success": Alarm(("episode/success", "episode/return"), _never_succeeds),
        "one_action": Alarm(("episode/top_action", "episode/success"), _one_action),
        "collapsed": Alarm(("policy/entropy", "episode/success"), _collapsed),
    }
    if program:
        found = {kind: found[kind] for kind in ("cut", "no_success", "collapsed")}
        found["unreadable"] = Alarm(("episode/unreadable", "episode/empty"), _often_unusable)
    return found | ({"fewer_calls": Alarm(("episode/calls",), _fewer_calls)} if config.conversation.tools else {})


def _ways_out(config: Any) -> str:
    return (
        f"raise reward.format ({config.reward.format:g} now) until a response without an action costs more than a "
        "whole episode can lose, or move the environment's negative rewards to the end of failed episodes"
    )


def _silence_pays(config: Any, unreadable: Track, empty: Track, below: Track, cut: Track) -> str:
    # only where some answers are already silent can the policy drift there
    found = any(value > 0 for track in (unreadable, cut) for value in track.latest)
    if not found or not any(below.latest):
        return ""
    return (
        f"doing nothing pays off: {max(below.latest):.0%} of a step's episodes earned less than "
        f"{silent_return(config):g}, which is what an episode without a single action earns (on_parse_error: "
        f"{config.actions.after_error}), so the policy can learn not to act; {_ways_out(config)}"
    )


def _no_actions(config: Any, unreadable: Track, empty: Track, below: Track) -> str:
    if below.now > 0:
        cause = f"doing nothing pays off here: {_ways_out(config)}"
    else:
        cause = (
            f"the prompt should ask for actions.format {config.actions.name!r} ({config.actions.manual!r}); a model "
            "that never uses this format can learn it from examples (recipe: agent_clone)"
        )
        if config.actions.format == NATIVE:
            cause = "the model does not write its tool calls as its chat template does; is it trained for tools?"
    return (
        f"{unreadable.now:.0%} of the responses of the last {STEPS} steps had no readable action, {empty.now:.0%} "
        f"were empty; look at the samples in the report; {cause}"
    )


def _often_unreadable(config: Any, unreadable: Track, empty: Track, below: Track) -> str:
    return _no_actions(config, unreadable, empty, below) if unreadable.now > OFTEN else ""


def _more_unreadable(config: Any, unreadable: Track, empty: Track, below: Track) -> str:
    if not unreadable.now > max(LITTLE, 2 * unreadable.start):
        return ""
    return f"from {unreadable.start:.0%} in the first {STEPS} steps: {_no_actions(config, unreadable, empty, below)}"


def _often_unusable(unreadable: Track, empty: Track) -> str:
    if not unreadable.now > OFTEN:
        return ""
    return (
        f"{unreadable.now:.0%} of the responses of the last {STEPS} steps were empty ({empty.now:.0%}) or had an "
        "invalid tool call, which the program does not get as a call; look at the samples in the report; is the model "
        "trained for tools?"
    )


def _often_cut(config: Any, program: bool, cut: Track) -> str:
    if not cut.now > OFTEN:
        return ""
    effect = "the program gets their text without calls" if program else "nothing of them is executed"
    return (
        f"{cut.now:.0%} of the responses of the last {STEPS} steps were truncated at the length limit, so {effect}; "
        f"raise sampler.max_new_tokens ({config.sampler.max_new_tokens} now), or have the prompt ask "
        "for shorter responses"
    )


def _often_refused(config: Any, refused: Track) -> str:
    if not refused.now > OFTEN:
        return ""
    return (
        f"{config.environment.factory} rejected {refused.now:.2g} actions per response over the last {STEPS} steps; "
        f"look at the samples in the report: does the prompt list the available actions? {{actions}} in "
        "conversation.system inserts the environment's `actions`"
    )


def _never_succeeds(success: Track, earned: Track) -> str:
    # no alarm before a full window, since early steps rarely succeed
    if len(earned.latest) < WINDOW or len(success.latest) < WINDOW or any(success.latest):
        return ""
    before = sum(earned.latest[:STEPS]) / STEPS
    # also for negative returns, where a factor would point the wrong way
    if not earned.now > before + LITTLE * abs(before):
        return ""
    return (
        f"no episode of {WINDOW} steps succeeded, although their return rose from {before:.3g} to {earned.now:.3g}: "
        "the policy is rewarded for something other than success; look at the samples in the report, at the "
        "environment's intermediate rewards, and at episode.success_above"
    )


def _fewer_calls(calls: Track) -> str:
    if not calls.now < LITTLE * calls.start:
        return ""
    return (
        f"responses make {calls.now:.2g} tool calls on average, down from {calls.start:.2g} in the first {STEPS} "
        "steps; look at the samples in the report, and check whether the reward depends on what the tools return"
    )


def _one_action(top: Track, success: Track) -> str:
    if not (top.now > NEARLY_ALL and success.now < OFTEN):
        return ""
    return (
        f"{top.now:.0%} of the actions of the last {STEPS} steps were one and the same, while {success.now:.0%} of the "
        "episodes succeed; look at the samples in the report: does this action pay more than the task, and does the "
        "agent see what changes?"
    )


def _collapsed(entropy: Track, success: Track) -> str:
    if not (entropy.now < LITTLE * entropy.start and success.now < OFTEN):
        return ""
    return (
        f"the policy's entropy fell from {entropy.start:.2g} to {entropy.now:.2g} nats per token while "
        f"{success.now:.0%} of the episodes succeed: it hardly explores any more; a lower trainer.learning_rate or an "
        "entropy bonus (objective.entropy) keeps the entropy up"
    )
