"""MiniWoB++ pages: repeatable, rewarded by the page independently of the clock, solved by the right click."""

import gymnasium
import numpy as np
import pytest

from mmrl.errors import UserError
from mmrl.gui.browser.miniwob import ONE_CLICK, RESTLESS, MiniWobEnv, MiniWobSettings, miniwob_names, miniwob_tasks

pytest.importorskip("miniwob", reason="pip install 'mmrl-suite[miniwob]'")


@pytest.fixture(scope="module")
def env(browser):
    made = MiniWobEnv(MiniWobSettings(max_steps=4), browser)
    yield made
    made.close()


def test_names():
    assert len(miniwob_names()) == 130
    assert set(ONE_CLICK) | set(RESTLESS) <= set(miniwob_names())


def test_wrong_settings_say_what_there_is():
    with pytest.raises(UserError, match=r"no page 'click-tset'; it has: .*click-test"):
        MiniWobEnv(MiniWobSettings(tasks=("click-tset",)))
    with pytest.raises(UserError, match=r"no page '\.\./core'"):
        MiniWobEnv(MiniWobSettings(tasks=("../core",)))
    with pytest.raises(UserError, match="partial_credit has no effect"):
        MiniWobEnv(MiniWobSettings(partial_credit=True))
    with pytest.raises(UserError, match=r"environment\.kwargs has no entry 'task'; it has: "):
        miniwob_tasks(task="click-test")


@pytest.mark.parametrize("name", ["click-test", "click-button", "email-inbox-delete"])
def test_a_seed_gives_one_screen_independently_of_earlier_ones(env, name):
    first, info = env.reset(seed=4, options={"task": name})
    assert first["image"].shape == (210, 160, 3)
    assert info["task"] == {"name": name, "seed": 4}
    env.step({"name": "click", "arguments": {"x": 80, "y": 130}})
    other, _ = env.reset(seed=5)
    again, _ = env.reset(seed=4, options={"task": {"name": name}})
    assert again["instruction"] == first["instruction"]
    assert np.array_equal(again["image"], first["image"])
    assert not np.array_equal(other["image"], first["image"])


SCROLLED = "() => [scrollX, scrollY]"


def test_a_reset_undoes_what_an_agent_did_to_the_page(browser):
    env = MiniWobEnv(MiniWobSettings(width_px=400, tasks=("click-test-2",)), browser)  # wide enough for the panel
    first, _ = env.reset(seed=4)
    button = next(element for element in env.elements() if element.tag == "button" and element.visible)
    for action in (
        {"name": "scroll", "arguments": {"direction": "right", "amount": 300}},
        {"name": "key", "arguments": {"key": "Control+a"}},
        {"name": "click", "arguments": {"point": button.center}},
    ):
        *_, info = env.step(action)
    assert info["raw_reward"] != 0, "the page's panel has a reward to show"
    again, _ = env.reset(seed=4)
    assert env.page.evaluate(SCROLLED) == [0, 0]
    assert np.array_equal(again["image"], first["image"])
    assert len({*map(tuple, again["image"][:, 170:].reshape(-1, 3).tolist())}) == 1, "nothing is beside the page"
    env.close()


def test_an_episode_begins_at_its_dialog_and_scrolling_does_not_lose_the_page(env):
    for seed in (100, 101):
        env.reset(seed=seed, options={"task": "click-dialog"})
        assert env.page.evaluate(SCROLLED) == [0, 0]
        assert any(element.tag == "button" and element.visible for element in env.elements())
    env.step({"name": "scroll", "arguments": {"direction": "right", "amount": 300}})
    assert env.page.evaluate(SCROLLED) == [0, 0], "nothing lies beside the page"


CARDS = """() => [...document.querySelectorAll('.card')].map(card => {
  const box = card.getBoundingClientRect();
  return [+card.innerText, box.x + box.width / 2, box.y + box.height / 2];
})"""


def test_a_part_of_the_reward_is_no_success(env):
    for best in (True, False):
        env.reset(seed=0, options={"task": "find-greatest"})
        _, x, y = (max if best else min)(env.page.evaluate(CARDS))
        env.step({"name": "click", "arguments": {"x": x, "y": y}})
        button = next(element for element in env.elements() if element.tag == "button")
        _, reward, terminated, _, info = env.step({"name": "click", "arguments": {"point": button.center}})
        assert (reward, terminated, info["success"]) == ((1.0, True, True) if best else (0.1, True, False))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*miniwob_names()} - {*RESTLESS}))
def test_two_resets_with_one_seed_are_equal_on_every_page(env, name):
    first, _ = env.reset(seed=7, options={"task": name})
    env.step({"name": "click", "arguments": {"x": 80, "y": 120}})
    again, _ = env.reset(seed=7, options={"task": name})
    assert env.page.evaluate(SCROLLED) == [0, 0]
    assert again["instruction"] == first["instruction"]
    assert np.array_equal(again["image"], first["image"])


@pytest.mark.parametrize("seed", range(3))
def test_the_requested_button_earns_1_and_another_one_minus_1(env, seed):
    for right in (True, False):
        observation, _ = env.reset(seed=seed, options={"task": "click-test-2"})
        wanted = "ONE" if "ONE" in observation["instruction"] else "TWO"
        buttons = [element for element in env.elements() if element.tag == "button" and element.visible]
        chosen = [button for button in buttons if (button.text.upper() == wanted) == right]
        if not chosen:  # covered by the other one
            continue
        _, reward, terminated, truncated, info = env.step({"name": "click", "arguments": {"point": chosen[0].center}})
        assert (reward, terminated, truncated) == (1.0 if right else -1.0, True, False)
        assert (info["success"], info["raw_reward"]) == (right, reward)


def test_the_reward_does_not_fall_with_time(env):
    env.reset(seed=0, options={"task": "click-test"})
    env.step({"name": "wait", "arguments": {}})
    button = next(element for element in env.elements() if element.tag == "button")
    _, reward, *_ = env.step({"name": "click", "arguments": {"point": button.center}})
    assert reward == 1.0


def test_an_episode_without_a_verdict_is_worth_nothing(env):
    env.reset(seed=0, options={"task": "click-test"})
    for _ in range(4):
        _, reward, terminated, truncated, info = env.step({"name": "scroll", "arguments": {"direction": "down"}})
    assert (reward, terminated, truncated, info["success"]) == (0.0, False, True, False)


def test_typing_and_logging_in(env):
    observation, _ = env.reset(seed=1, options={"task": "login-user"})
    user, word = observation["instruction"].split('"')[1::2]
    fields = [element for element in env.elements() if element.tag == "input" and element.visible]
    for element, text in zip(fields, (user, word), strict=True):
        env.step({"name": "click", "arguments": {"point": element.center}})
        env.step({"name": "type", "arguments": {"text": text}})
    assert [element.value for element in env.elements()[:2]] == [user, word]


def test_gymnasium_makes_it_by_name(browser):
    browser.close()  # the environment starts the browser of the process
    env = gymnasium.make("mmrl.gui.browser.miniwob:mmrl/MiniWob-v0", tasks=["click-test"], max_steps=2)
    observation, info = env.reset(seed=3)
    assert env.observation_space.contains(observation)
    assert info["task"]["name"] == "click-test"
    env.action_space.seed(0)
    for _ in range(5):
        assert env.action_space.contains(env.action_space.sample())
    env.unwrapped._browser.close()
    env.close()
    browser.restart(after_failure=False)
