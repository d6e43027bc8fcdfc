"""Training tasks by how often the agent solves them before training."""

import json

import pytest

from mmrl.agents.agent_recipe import AgentRecipe
from mmrl.agents.environments.agent_tasks import AgentTask, TaskSetConfig, list_tasks
from mmrl.agents.environments.environment import ActionConfig, ParsedAnswer
from mmrl.agents.selection import TaskRate, TaskSelector, build_tasks, measure_tasks, write_tasks
from mmrl.cli import main
from mmrl.config import save
from mmrl.errors import UserError
from mmrl.fields import check_config
from tests.agents.runs import by_length
from tests.agents.test_recipe import make_config

RATES = [TaskRate(AgentTask(f"t/{n}", {"name": "t"}, n, "Go."), n, 4) for n in range(5)]


def test_the_published_rule_keeps_tasks_that_succeeded_once():
    assert [rate.task.id for rate in TaskSelector(n_rollouts=4).select(RATES)] == ["t/1", "t/2", "t/3", "t/4"]


def test_tasks_that_are_solved_already_can_be_left_out():
    assert [rate.successes for rate in TaskSelector(2, 4, max_rate=0.75).select(RATES)] == [2, 3]


def test_a_task_without_results_is_not_kept():
    assert not TaskSelector(min_success=0).keeps(TaskRate(AgentTask("t/0"), 0, 0))


@pytest.mark.parametrize("options", [{"n_rollouts": 0}, {"min_success": 17}, {"max_rate": 0.0}, {"max_rate": 1.5}])
def test_impossible_rules_are_refused(options):
    with pytest.raises(UserError, match="expected n_rollouts of at least 1"):
        TaskSelector(**options)


def test_the_file_is_read_as_tasks_and_holds_the_rates(tmp_path):
    write_tasks(RATES[1:3], tmp_path / "tasks.jsonl")
    assert list_tasks(TaskSetConfig(file=str(tmp_path / "tasks.jsonl"))) == [rate.task for rate in RATES[1:3]]
    rows = [json.loads(line) for line in (tmp_path / "tasks.jsonl").open()]
    assert [(row["success_rate"], row["rollouts"]) for row in rows] == [(0.25, 4), (0.5, 4)]
    with pytest.raises(UserError, match="no task is left"):
        write_tasks([], tmp_path / "none.jsonl")


def test_rates_are_those_of_sampled_episodes_with_a_result(tmp_path, folder, monkeypatch, closing):
    """A corridor of one step: it succeeds to the right and fails to the left."""
    monkeypatch.setattr(ActionConfig, "parse", by_length)
    recipe = closing(AgentRecipe(make_config(tmp_path, folder, kwargs={"length": 1})))
    rates = list(measure_tasks(recipe, 6, batch_tasks=3))
    assert rates == list(measure_tasks(recipe, 6)), "the batch does not matter"
    assert [rate.task for rate in rates] == list(recipe.train_tasks)
    assert all(rate.rollouts == 6 for rate in rates)
    assert 0 < sum(rate.successes for rate in rates) < 24


def test_failed_episodes_count_for_nothing(tmp_path, folder, monkeypatch, closing):
    monkeypatch.setattr(
        ActionConfig, "parse", lambda self, text, cut=False, tools=(): ParsedAnswer(error="no_action", detail="-")
    )
    config = make_config(tmp_path, folder, kwargs={"length": 30, "side": 168})
    config.episode.max_turns, config.episode.overflow.result = 30, "failed"
    recipe = closing(AgentRecipe(config))
    rates = list(measure_tasks(recipe, 1))
    assert [rate.rollouts for rate in rates] == [0] * 4


def test_the_command_writes_a_readable_task_list_and_keeps_the_episodes(tmp_path, folder, monkeypatch, capsys):
    monkeypatch.setattr(ActionConfig, "parse", by_length)
    config = make_config(tmp_path, folder, kwargs={"length": 1})
    config.recipe = "agent"
    save(config, tmp_path / "agent.yaml")
    words = ["select", str(tmp_path / "agent.yaml"), "--output", str(tmp_path / "tasks.jsonl"), "--rollouts", "4"]
    assert main([*words, "--record", str(tmp_path / "episodes"), "data.seeds=3"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "episodes succeeded" in line]
    kept = [line.partition(":")[0] for line in lines if line.endswith(", kept")]
    assert len(lines) == 3
    assert [task.id for task in list_tasks(TaskSetConfig(file=str(tmp_path / "tasks.jsonl")))] == kept
    assert len(list((tmp_path / "episodes").glob("episode-*.pt"))) == 12


def test_a_run_without_a_task_file_chooses_first(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(ActionConfig, "parse", by_length)
    config = make_config(tmp_path, folder, kwargs={"length": 1})
    config.recipe = "agent"
    save(config, tmp_path / "agent.yaml")
    options = {"config": str(tmp_path / "agent.yaml"), "rollouts": 4, "overrides": ["data.seeds=3"]}
    chosen = TaskSetConfig(
        file=str(tmp_path / "tasks.jsonl"), build="mmrl.agents.selection:build_tasks", build_options=options
    )
    tasks = list_tasks(chosen)
    assert 0 < len(tasks) <= 3
    build_tasks(tmp_path / "again.jsonl", **options)
    assert (tmp_path / "again.jsonl").read_text() == (tmp_path / "tasks.jsonl").read_text()
    with pytest.raises(UserError, match=r"it has no effect while data\.file is None"):
        check_config(TaskSetConfig(build="mmrl.agents.selection:build_tasks"), "data")
