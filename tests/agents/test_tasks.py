import json

import pytest

from mmrl.agents.environments.agent_tasks import AgentTask, TaskSetConfig, check_disjoint, list_tasks
from mmrl.errors import UserError
from mmrl.fields import check_config


def test_tasks_take_turns():
    tasks = list_tasks(TaskSetConfig(["a", "b"], seeds=2, first_seed=5, options={"size": 3}, instruction="go"))
    assert [task.id for task in tasks] == ["a/5", "b/5", "a/6", "b/6"]
    assert tasks[1] == AgentTask("b/5", {"name": "b", "size": 3}, 5, "go")
    assert [task.id for task in list_tasks(TaskSetConfig(["a", "b"], seeds=10**9, max_tasks=3))] == [
        "a/0",
        "b/0",
        "a/1",
    ]
    assert list_tasks(TaskSetConfig(seeds=1, options={"size": 3})) == [AgentTask("task/0", {"size": 3}, 0)]


def test_tasks_come_from_a_file(tmp_path):
    file = tmp_path / "tasks.jsonl"
    rows = [
        {"task": "login", "seed": 3},
        {"task": {"name": "maze", "size": 5}, "seed": 4, "instruction": "find out", "id": "first maze"},
        {"task": {"size": 5}},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = list_tasks(TaskSetConfig(file=str(file), instruction="look"))
    assert tasks[:2] == [
        AgentTask("login/3", {"name": "login"}, 3, "look"),
        AgentTask("first maze", {"name": "maze", "size": 5}, 4, "find out"),
    ]
    assert (tasks[2].task, tasks[2].seed) == ({"size": 5}, 0)
    assert len({task.id for task in tasks}) == 3
    assert len(list_tasks(TaskSetConfig(file=str(file), max_tasks=2))) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"goal": "x"}, r"unknown entry goal; a task has id, task, seed, instruction"),
        ({"task": 3}, "task is 3; expected an object or a task name"),
        ({"task": "a", "seed": -1}, "seed is -1; expected an integer from 0"),
        ({"task": "a", "seed": True}, "seed is True"),
        ({"task": "a", "seed": 1.0}, "seed is 1.0"),
        ({"task": "a", "id": 7}, "id and instruction must be text"),
        ({"task": "good", "seed": 0}, "two tasks have the id good/0; ids must be unique"),
    ],
)
def test_rows_that_are_not_tasks_are_named(tmp_path, row, message):
    file = tmp_path / "tasks.jsonl"
    file.write_text(f"{json.dumps({'task': 'good', 'seed': 0})}\n{json.dumps(row)}\n")
    with pytest.raises(UserError, match=message) as raised:
        list_tasks(TaskSetConfig(file=str(file)))
    assert "tasks.jsonl" in str(raised.value)


def test_an_empty_file_has_no_tasks(tmp_path):
    (tmp_path / "tasks.jsonl").touch()
    with pytest.raises(UserError, match="has no tasks"):
        list_tasks(TaskSetConfig(file=str(tmp_path / "tasks.jsonl")))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TaskSetConfig(["a"], file="x.jsonl"), "names is .*, but it has no effect while file is 'x.jsonl'"),
        (TaskSetConfig(["a", "a"]), "duplicate task names: a, a"),
        (TaskSetConfig(seeds=0), "seeds is 0; must be in"),
        (TaskSetConfig(first_seed=2**31 - 1, seeds=2), "exceed the maximum seed 2147483647"),
    ],
)
def test_sets_that_cannot_be_are_refused(config, message):
    with pytest.raises((UserError, ValueError), match=message):
        check_config(config)


def test_training_and_evaluation_share_no_task():
    train = list_tasks(TaskSetConfig(["a", "b"], seeds=10))
    held_out = {
        "other seeds": list_tasks(TaskSetConfig(["a"], seeds=5, first_seed=10)),
        "other names": list_tasks(TaskSetConfig(["c"], seeds=5)),
        "other options": list_tasks(TaskSetConfig(["a"], seeds=5, options={"size": 3})),
    }
    check_disjoint(train, held_out)
    overlapping = list_tasks(TaskSetConfig(["b"], seeds=3, first_seed=9))
    with pytest.raises(UserError, match=r"1 of 3 tasks of later are also training tasks, such as b/9; .*first_seed"):
        check_disjoint(train, {**held_out, "later": overlapping})
