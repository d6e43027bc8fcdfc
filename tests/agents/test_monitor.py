"""Alarms of agents: what the metrics of a step's episodes lead to, and when."""

from collections import Counter

import pytest

from mmrl.agents.agent_recipe import AgentConfig, AgentRewardConfig
from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.environments.env_pool import EnvironmentConfig
from mmrl.agents.environments.environment import ActionConfig
from mmrl.agents.monitor import agent_alarms, count_below_silence, count_episodes, episode_metrics, silent_return
from mmrl.agents.rollout.conversation import ConversationConfig
from mmrl.agents.rollout.episodes import Episode, EpisodeConfig
from mmrl.runs.run_log import RunWarnings


def config(on_parse_error="terminate", format=0.0, tools=False):
    return AgentConfig(
        environment=EnvironmentConfig("rooms.py:Rooms"),
        actions=ActionConfig("tool_call" if tools else "tag", on_parse_error=on_parse_error),
        conversation=ConversationConfig(tools=tools),
        episode=EpisodeConfig(max_turns=4),
        reward=AgentRewardConfig(format=format),
    )


def warned(steps, **options):
    """Steps and kinds of the warnings of a run with such metrics."""
    warnings, found = RunWarnings(None, alarms=agent_alarms(config(**options))), {}
    for number, metrics in enumerate(steps, 1):
        before = set(warnings.said)
        warnings.step(number, {f"episode/{name}": value for name, value in metrics.items()})
        found |= dict.fromkeys(warnings.said.keys() - before, number)
    return found, warnings.said


def test_what_an_agent_program_gets_of_a_response_is_said_as_it_is():
    steps = [{"cut": 0.9, "unreadable": 0.9, "empty": 0.1, "refused": 1.0, "below_silence": 1.0}] * 5

    def said(**options):
        warnings = RunWarnings(None, alarms=agent_alarms(config("noop"), **options))
        for number, metrics in enumerate(steps, 1):
            warnings.step(number, {f"episode/{name}": value for name, value in metrics.items()})
        return warnings.said

    program, own = said(program=True), said()
    assert program.keys() == {"cut", "unreadable"}
    assert "the program gets their text without calls; raise sampler.max_new_tokens" in program["cut"]
    assert "an invalid tool call, which the program does not get as a call" in program["unreadable"]
    assert "so nothing of them is executed; raise sampler.max_new_tokens" in own["cut"]
    assert "silence_pays" in own


def test_counts_of_episodes_and_of_those_below_silence():
    said = {"answers": ["a", "b"], "errors": ["", "empty"], "rewards": [-0.1, 0.0], "ending": "unreadable"}
    tried = {"answers": ["a", "b"], "errors": ["", ""], "rewards": [-0.1, -0.1], "ending": "truncated"}
    cut = {"answers": ["a", "b"], "errors": ["", "cut"], "rewards": [0.5, 0.0], "ending": "cut", "success": True}
    silent = {"answers": ["a"], "errors": ["no_action"], "rewards": [0.0], "ending": "unreadable"}
    lost = {"answers": ["a"], "errors": [""], "rewards": [-9.0], "ending": "failed"}
    episodes = [Episode(AgentTask("t"), **each) for each in (said, tried, cut, silent, lost)]
    seen = Counter()
    count_episodes(seen, episodes)
    count_below_silence(seen, episodes, config())
    metrics = episode_metrics(seen)
    assert (seen["failed"], seen["results"], seen["answers"]) == (1, 4, 7)
    assert metrics["episode/success"] == metrics["episode/below_silence"] == pytest.approx(1 / 4)
    assert metrics["episode/unreadable"] == pytest.approx(2 / 7)
    assert metrics["episode/empty"] == metrics["episode/cut"] == pytest.approx(1 / 7)
    for format, count in ((0.1, 1), (0.2, 0)):  # the trial cost 0.2
        seen.clear()
        count_below_silence(seen, episodes, config(format=format))
        assert seen["below_silence"] == count
    modes = (("terminate",), ("terminate", 0.5), ("noop", 0.5))
    assert [silent_return(config(*each)) for each in modes] == [0, -0.5, -2]
    costly = config("noop", 0.5)
    costly.reward.invalid_turn = -0.25
    assert silent_return(costly) == -3


@pytest.mark.parametrize("on_parse_error", ["terminate", "noop"])
def test_silence_that_pays_is_said_as_soon_as_the_policy_can_find_it(on_parse_error):
    steps = [{"below_silence": 0.6, "unreadable": 0.0}] * 2 + [{"below_silence": 0.5, "unreadable": 0.01}]
    found, said = warned(steps, on_parse_error=on_parse_error)
    assert found == {"silence_pays": 3}
    assert f"on_parse_error: {on_parse_error}" in said["silence_pays"]
    assert warned([{"below_silence": 0.0, "unreadable": 0.4}] * 3)[0] == {}


def test_rising_shares_of_answers_without_effect_are_said_by_step_ten():
    shares = [0.03 * step + 0.001 for step in range(30)]
    rising = [{"unreadable": share, "empty": share, "below_silence": 0.0} for share in shares]
    found, said = warned(rising)
    assert found == {"more_unreadable": 8, "unreadable": 20}
    assert "from 6% in the first 5 steps: 15% of the responses" in said["more_unreadable"]
    for name in ("unreadable", "cut", "refused"):
        found, _ = warned([{name: 0.98, "below_silence": 0.0}] * 10)
        assert found == {name: 5}
    assert warned([{"unreadable": 0.01 * (step > 6), "cut": 0.4, "refused": 0.4} for step in range(40)])[0] == {}


def test_a_return_that_rises_without_success_and_tools_that_are_forgotten_are_said():
    found, _ = warned([{"success": 0.0, "return": 0.1 * step} for step in range(40)])
    assert found == {"no_success": 20}
    assert warned([{"success": float(step == 10), "return": 0.1 * step} for step in range(20)])[0] == {}
    assert warned([{"success": 0.0, "return": 0.3} for _ in range(40)])[0] == {}
    calls = [{"calls": 1.0} for _ in range(5)] + [{"calls": 0.0} for _ in range(5)]
    assert warned(calls, tools=True)[0] == {"fewer_calls": 10}
    assert warned(calls)[0] == {}


def test_one_action_for_everything_is_said_unless_it_solves_the_tasks():
    assert warned([{"top_action": 0.96, "success": 0.4}] * 10)[0] == {"one_action": 5}
    assert warned([{"top_action": 0.94, "success": 0.4}] * 10)[0] == {}
    assert warned([{"top_action": 0.96, "success": 0.6}] * 10)[0] == {}


def test_actions_seconds_and_endings_are_counted_over_processes():
    def episodes(actions, seconds, **more):
        return [Episode(AgentTask("t"), answers=["x"], actions=actions, step_seconds=seconds, **more)]

    here, there = Counter(), Counter()
    count_episodes(here, episodes(["a", "a", "b"], [0.1, 0.1, 0.2], ending="truncated", overflows=True))
    count_episodes(here, episodes(["b"] * 5, [9.0] * 5, ending="failed"))
    count_episodes(there, episodes(["a"] * 7, [0.1234] * 6 + [3.0], ending="terminated"))
    count_episodes(there, episodes([], [], ending="overflow", overflows=True))
    metrics = episode_metrics(here + there)
    assert metrics["episode/top_action"] == 9 / 10, "actions of broken environments do not count"
    assert (metrics["time/env_step_p50"], metrics["time/env_step_p90"]) == (0.12, 0.2)
    assert [(seen["overflow"], seen["failed"]) for seen in (here, there)] == [(1, 1), (1, 0)]
    assert not {"episode/top_action", "time/env_step_p50"} & episode_metrics(Counter()).keys()


def test_a_policy_that_stops_exploring_before_it_succeeds_is_said():
    for success, kinds in ((0.1, {"collapsed"}), (0.9, set())):
        warnings = RunWarnings(None, alarms=agent_alarms(config()))
        for step in range(12):
            warnings.step(step, {"policy/entropy": 2.0 if step < 6 else 0.1, "episode/success": success})
        assert set(warnings.said) == kinds
