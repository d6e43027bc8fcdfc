"""Settings that are read as a list: equal clicks give equal pages, and frames of one page do not disturb each other."""

import pytest

from mmrl.agents.environments.environment import Action
from mmrl.errors import UserError
from mmrl.gui.browser.browser import BrowserFailure
from mmrl.gui.toy.listed_settings import ListedSettings


def play(env, seed, clicks=()):
    """Observations, rewards and anchors of an episode: some clicks, then the expert's."""
    first, info = env.reset({}, seed)
    texts, rewards, anchors = [first.text], [], [info["anchor"]]
    for number in range(env._max_steps):
        action = Action(clicks[number]) if number < len(clicks) else env.expert()
        observation, reward, ended, truncated, info = env.step(action)
        texts, rewards, anchors = [*texts, observation.text], [*rewards, reward], [*anchors, info["anchor"]]
        if ended or truncated:
            break
    return texts, rewards, anchors, info


def test_the_expert_mends_mistakes_and_one_page_serves_all(browser):
    one, other = ListedSettings(browser=browser), ListedSettings(wanted=3, tabs=4, max_steps=12, browser=browser)
    for seed in range(4):
        _, rewards, _, info = play(other, seed, clicks=("4", "1"))
        assert (rewards[-1], sum(rewards), info["success"]) == (1.0, 1.0, True)
    first = play(one, 3)
    one.reset({}, 3)
    other.reset({}, 5)
    other.step(Action("4"))
    assert one.step(one.expert())[0].text == first[0][1]  # what happens in another frame leaves this one alone
    assert play(one, 3) == first
    assert len(browser._open_contexts) == 1


def test_equal_states_have_equal_anchors(browser):
    env = ListedSettings(tabs=2, browser=browser)
    texts, _, anchors, info = play(env, 3, clicks=("4", "4", "9", "0.5", "7"))
    assert texts[0].endswith("then save.\n" + anchors[0])
    assert anchors[1] != anchors[0] == anchors[2] == anchors[3] == anchors[4]
    assert texts[3].startswith("There is no control '9'.\n1 tab ")
    assert "action_error" not in info


def test_saving_anything_else_pays_nothing(browser):
    env = ListedSettings(wanted=1, tabs=1, max_steps=2, browser=browser)
    assert env.reset({}, 1)[0].text.splitlines()[1:] == [
        "1 tab Sound",
        "2 checkbox Key sounds on",
        "3 checkbox Alarm off",
        "4 button Save",
        "5 button Reset",
    ]
    assert env.step(Action("4"))[1:4] == (0.0, True, False)
    env.reset({}, 1)
    assert [env.step(Action("5"))[1:4] for _ in range(2)] == [(0.0, False, False), (0.0, False, True)]


def test_a_killed_browser_costs_the_episode(browser):
    env = ListedSettings(browser=browser)
    before = play(env, 3)
    env.reset({}, 3)
    browser.kill()
    with pytest.raises(BrowserFailure):
        env.step(Action("1"))
    assert play(env, 3) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tabs": 5}, "tabs is 5; expected 1 to 4"),
        ({"wanted": 5, "tabs": 2}, "with 2 tabs supports 1 to 4"),
        ({"max_steps": 0}, "1"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(UserError, match=message):
        ListedSettings(**options)
