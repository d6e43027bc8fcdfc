"""Agent-R in outline: failures that are played again to their first error, and revised."""

from dataclasses import replace

import pytest

from mmrl.agents.environments.environment import Action
from mmrl.agents.environments.experts import run_expert
from mmrl.agents.environments.gym import GymEnvironment
from mmrl.agents.rollout.episodes import AgentPayload, Episode
from mmrl.agents.toy.grid import GridWorld
from mmrl.contrib.agents.agent_revision import AgentRevisionConfig, AgentRevisionRecipe, RevisionSettings, revise
from mmrl.training.processes import Streams
from mmrl.training.recipe import NoUsableTasksError, Step
from tests.agents.test_cloning import make_config

BACK = {"up": "down", "down": "up", "left": "right", "right": "left"}


def make_env():
    return GymEnvironment(GridWorld(size=4, min_distance=3, max_steps=20))


def say(name):
    return Action(name, {}, f"I walk. <action>{name}</action>")


def path_of(seed):
    return [turn.action.name for turn in run_expert(make_env(), {}, seed, "tag").turns]


def test_the_expert_goes_on_from_the_first_error():
    path = path_of(3)
    said = [say(path[0]), say(BACK[path[0]]), say(path[0]), say(path[0])]
    episode, own = revise(make_env(), {}, 3, said, "tag", "Wrong.")
    assert own == 2
    texts = [turn.action.text for turn in episode.turns]
    assert texts[:2] == [said[0].text, said[1].text]
    assert texts[2] == f"Wrong. <action>{path[0]}</action>"
    assert texts[3:] == [f"<action>{name}</action>" for name in path[1:]], "the thought is said once"
    assert episode.success


def test_without_an_error_the_expert_goes_on_without_the_thought():
    path = path_of(3)
    episode, own = revise(make_env(), {}, 3, [say(path[0])], "tag", "Wrong.")
    assert own == 1
    assert [turn.action.text for turn in episode.turns[1:]] == [f"<action>{name}</action>" for name in path[1:]]


@pytest.fixture
def recipe(tmp_path, tiny_folders, closing):
    cloned = make_config(tmp_path, tiny_folders["qwen2_5_vl"])
    shared = {key: value for key, value in vars(cloned).items() if key not in ("random_actions", "play_once")}
    config = AgentRevisionConfig(**shared, revision=RevisionSettings(attempts=2, thought="Wrong."))
    config.validate()
    return closing(AgentRevisionRecipe(config))


def answers_of(recipe, attempts):
    """Have the policy's attempts say what is given, each with a return."""

    def run(policy, tasks, seeds, **_):
        found = []
        for number, task in enumerate(tasks):
            answers, total = attempts(task, number % 2)
            found.append(Episode(task, ending="terminated", rewards=[total], answers=answers, success=total > 0))
        return found

    recipe.run_episodes = run


def test_the_worst_attempt_is_revised_and_the_revision_alone_is_trained(recipe):
    answers_of(recipe, lambda task, number: (["<action>up</action>"] * 3, float(number)))
    rollouts = recipe.batch(recipe.policy, recipe.train_tasks[:3], Streams(0), Step())
    assert recipe.noted["revision/failed"].value == 1.0
    payload = AgentPayload.of(rollouts)
    tokenizer = recipe.policy.processor.tokenizer
    for row in range(rollouts.num_rows):
        trained = rollouts.mask[row] > 0
        text = tokenizer.decode(payload.response_ids[row][: len(trained)][trained])
        given = tokenizer.decode(payload.response_ids[row])
        assert text.count("<action>") < given.count("<action>") or "Wrong." not in text
        assert rollouts.turn[row][trained].min() >= 0
    assert any("Wrong." in tokenizer.decode(ids) for ids in payload.response_ids)


def test_tasks_that_always_succeed_are_learned_as_they_are(recipe):
    path = {task.id: [] for task in recipe.train_tasks}
    for task in recipe.train_tasks[:2]:
        env = GymEnvironment(GridWorld(**recipe.config.environment.kwargs))
        path[task.id] = [f"So. {turn.action.text}" for turn in run_expert(env, task.task, task.seed, "tag").turns]
    answers_of(recipe, lambda task, number: (path[task.id], 1.0))
    rollouts = recipe.batch(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
    assert recipe.noted["revision/failed"].value == 0.0
    payload = AgentPayload.of(rollouts)
    for row, task in enumerate(recipe.train_tasks[:2]):
        trained = rollouts.mask[row] > 0
        text = recipe.policy.processor.tokenizer.decode(payload.response_ids[row][: len(trained)][trained])
        assert text.count("So.") == len(path[task.id])


def test_a_task_that_a_step_holds_twice_is_revised_by_its_own_attempts(recipe):
    """Another process may have the second one."""
    totals = iter((1.0, 1.0, 0.0, 0.0))
    answers_of(recipe, lambda task, number: ([f"<action>{path_of(task.seed)[0]}</action>"], next(totals)))
    recipe.batch(recipe.policy, recipe.train_tasks[:1] * 2, Streams(0), Step())
    assert recipe.noted["revision/failed"].value == 0.5


def test_a_batch_without_an_episode_that_has_no_result_has_the_places_of_the_others(recipe):
    answers_of(recipe, lambda task, number: (["<action>up</action>"], float(task is recipe.train_tasks[1])))
    played = recipe.run_episodes
    recipe.run_episodes = lambda *given, **options: [
        replace(one, ending="failed") if number in (2, 3) else one
        for number, one in enumerate(played(*given, **options))
    ]
    assert recipe.batch(recipe.policy, recipe.train_tasks[:3], Streams(0), Step()).places == [0, 2]


def test_attempts_without_a_result_leave_nothing(recipe):
    recipe.run_episodes = lambda policy, tasks, seeds, **_: [Episode(task, ending="failed") for task in tasks]
    with pytest.raises(NoUsableTasksError, match="no attempt has a result"):
        recipe.batch(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
    assert replace(recipe.config.revision, thought="").thought == ""
