"""MiniWoB++ as numbered lists: experts solve the pages, equal seeds give equal lists, and only a full reward counts."""

import pytest

from mmrl.agents import Action
from mmrl.errors import UserError
from mmrl.gui.browser.listed_miniwob import EXPERTS, TASKS, Line, ListedMiniWob

pytest.importorskip("miniwob", reason="pip install 'mmrl-suite[miniwob]'")


@pytest.fixture(scope="module")
def env(browser):
    made = ListedMiniWob(max_steps=8, browser=browser)
    yield made
    made.close()


def play(env, name, seed):
    """Texts and rewards of an episode of the expert."""
    observation, _ = env.reset({"name": name}, seed)
    texts, reward, ended = [observation.text], 0.0, False
    while not ended:
        observation, reward, terminated, truncated, _ = env.step(env.expert())
        ended = terminated or truncated
        texts.append(observation.text)
    return texts, reward


@pytest.mark.parametrize("name", TASKS)
def test_experts_solve_their_pages_and_equal_seeds_give_equal_lists(env, name):
    first, reward = play(env, name, 3)
    assert reward == 1.0
    play(env, TASKS[0], 5)
    assert play(env, name, 3) == (first, 1.0)
    assert play(env, name, 4)[0] != first or name == "click-button-sequence"


def test_every_task_has_an_expert():
    assert set(EXPERTS) == set(TASKS)


def test_a_wrong_click_earns_nothing_and_an_unknown_line_costs_a_step(env):
    observation, facts = env.reset({"name": "click-link"}, 0)
    assert observation.text.startswith('Click on the link "In".\n1 generic egestas.')
    assert "*generic In" in observation.text
    same, reward, terminated, truncated, info = env.step(Action("19"))
    assert (reward, terminated, truncated, info["action_error"]) == (0.0, False, False, "unknown_line")
    assert same.text.startswith("There is no line '19'.\n1 generic egestas.")
    assert info["anchor"] == facts["anchor"]
    _, reward, terminated, _, info = env.step(Action("1"))
    assert (reward, terminated, info["success"], info["raw_reward"]) == (0.0, True, False, -1.0)


def test_environments_of_one_browser_do_not_touch_each_other(env, browser):
    other = ListedMiniWob(browser=browser)
    begun, _ = env.reset({"name": "choose-list"}, 1)
    other.reset({"name": "login-user"}, 1)
    other.step(other.expert())
    after, *_ = env.step(Action("20"))
    assert after.text.endswith(begun.text.partition("\n")[2])
    other.close()


def test_an_episode_is_truncated(browser):
    env = ListedMiniWob(max_steps=2, browser=browser)
    env.reset({"name": "scroll-text-2"}, 0)
    env.step(Action("1"))
    _, reward, terminated, truncated, info = env.step(Action("1"))
    assert (reward, terminated, truncated, info["success"]) == (0.0, False, True, False)
    env.close()


def test_lines_are_starred_where_the_instruction_has_their_words_in_order():
    line = Line(0, "choose", "Solomon Islands", False, "")
    assert line.shown("Select Solomon Islands from the list.") == "*choose Solomon Islands off"
    assert line.shown("Select Islands from the list.") == "choose Solomon Islands off"
    typed = Line(1, "type", "Tags:", None, "Sa", "ino", 1)
    assert typed.shown('Enter an item that ends with "ino".') == "*type ino into 1 Tags: = Sa"


def test_wrong_settings_say_what_there_is(browser):
    with pytest.raises(UserError, match=r"no page 'click-tset'; it has: .*click-test"):
        ListedMiniWob(["click-tset"])
    with pytest.raises(UserError, match="tasks is empty"):
        ListedMiniWob([])
    with pytest.raises(UserError, match="max_steps is 0"):
        ListedMiniWob(max_steps=0)
    env = ListedMiniWob(browser=browser)
    with pytest.raises(UserError, match="no entry 'page'; it may have name, seed"):
        env.reset({"page": "click-link"}, 0)
    env.reset({"name": "click-test"}, 0)
    with pytest.raises(UserError, match="click-test has no expert"):
        env.expert()
