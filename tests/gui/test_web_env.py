"""Tasks in a real browser: experts solve them, equal seeds give equal episodes, no action breaks them."""

import json

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from mmrl.agents.environments.environment import Action, Observation, as_outcome, as_start, parse_answer
from mmrl.agents.environments.experts import run_expert, write_episodes
from mmrl.agents.environments.videos import draw_frames
from mmrl.errors import ConfigError, UserError
from mmrl.gui.browser.browser import BrowserFailure
from mmrl.gui.browser.page import GuardedPage
from mmrl.gui.browser.page_env import PageEnv, PageEnvSettings, PageVerdict, WebAgentEnv
from mmrl.gui.grounding.coords import CoordinateSpace, Resize
from mmrl.gui.toy.tasks.catalogue import TASKS, Disturbances, make_case
from mmrl.gui.toy.web_env import ENVIRONMENT_IDS, WebTaskAgentEnv, WebTaskEnv, WebTaskSettings, web_tasks

ROUGH = Disturbances(popup=0.2, flip=0.2, delay=0.4)


def click(x, y):
    return {"name": "click", "arguments": {"x": x, "y": y}}


@pytest.fixture
def make_env(browser, closing):
    return lambda **settings: closing(WebTaskEnv(WebTaskSettings(**settings), browser))


QUICK = ("mail", "settings")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TASKS]
)
def test_the_expert_solves_every_task(make_env, name):
    calm, rough = make_env(max_steps=40), make_env(max_steps=60, disturbances=ROUGH)
    most = TASKS[name].most_goals
    for env, goals, distractors, seed in ((calm, most, 3, 12), (rough, 2, 0, 13)):
        episode = run_expert(WebTaskAgentEnv(env), {"name": name, "sub_goals": goals, "distractors": distractors}, seed)
        assert (episode.reward, episode.success) == (1.0, True), [turn.action.text for turn in episode.turns]
        for turn in episode.turns:
            parsed = parse_answer(turn.action.text, "json", strict=True)
            assert [(action.name, action.arguments) for action in parsed.actions] == [
                (turn.action.name, turn.action.arguments)
            ]


def test_a_mended_mistake_still_leads_to_success(make_env):
    env = make_env(max_steps=30)
    env.reset(seed=0, options={"task": {"name": "login", "seed": 2, "sub_goals": 1}})
    fields = {element.key: element for element in env.elements()}
    for action in (
        {"name": "click", "arguments": {"point": fields["user"].center}},
        {"name": "type", "arguments": {"text": "wrong"}},
        {"name": "click", "arguments": {"point": fields["remember"].center}},
    ):
        env.step(action)
    over = False
    while not over:
        *_, terminated, truncated, info = env.step(env.expert_action())
        over = terminated or truncated
    assert info["success"]


def test_one_seed_gives_one_episode(make_env):
    task = {"name": "settings", "seed": 5}
    episodes = [run_expert(WebTaskAgentEnv(make_env(disturbances=ROUGH, max_steps=40)), task, 9) for _ in range(2)]
    pictures = [[turn.observation.images[0] for turn in episode.turns] for episode in episodes]
    assert len(pictures[0]) == len(pictures[1]) > 2
    assert all(np.array_equal(one, other) for one, other in zip(*pictures, strict=True))


def test_the_seed_of_a_task_fixes_its_case_and_that_of_the_episode_its_luck(make_env):
    env = make_env(disturbances=Disturbances(popup=1.0))
    first, info = env.reset(seed=1, options={"task": {"name": "mail", "seed": 5}})
    *_, step = env.step({"name": "wait", "arguments": {}})
    shown = env.render().copy()
    second, _ = env.reset(seed=2, options={"task": info["task"]})
    assert second["instruction"] == first["instruction"]
    assert np.array_equal(second["image"], first["image"])
    env.step({"name": "wait", "arguments": {}})
    assert step["popup"]
    assert not np.array_equal(env.render(), shown)


def test_cases_differ_by_seed_and_by_their_knobs():
    for name, kind in TASKS.items():
        assert len({make_case(name, seed).instruction for seed in range(20)}) > 5
        easy, hard = make_case(name, 0, 1, 0), make_case(name, 0, kind.most_goals, 3)
        assert len(json.dumps(easy.config)) < len(json.dumps(hard.config))
        assert make_case(name, 3) == make_case(name, 3)
    for arguments in (("logout", 0), ("login", 0, 9), ("login", 0, 1, 9)):
        with pytest.raises(UserError, match=r"unknown task|supports 1 to 3|distractors is .* expected 0 to 3"):
            make_case(*arguments)


def test_an_action_that_cannot_be_executed_costs_a_step_and_is_reported(make_env):
    env = make_env(max_steps=3)
    before, _ = env.reset(seed=0)
    for number, (action, code) in enumerate([(click(-5, 3), "out_of_bounds"), ({"name": "fly"}, "unknown_action")], 1):
        after, reward, terminated, truncated, info = env.step(action)
        assert (info["action_error"], reward, terminated, truncated) == (code, 0.0, False, False)
        assert after["step"] == number
        assert np.array_equal(after["image"], before["image"])
    *_, truncated, info = env.step(Action("wait", {}, ""))
    assert (truncated, info["action_error"]) == (True, None)
    with pytest.raises(UserError, match="call reset"):
        env.step(click(1, 1))


class Sum(PageEnv):
    """A question whose answer is what the agent finishes with."""

    def make_task(self, options, seed):
        return {}

    def begin(self, page, task, seed):
        page.load_html("<p>2 + 2</p>")
        return "Read the sum and finish with its value."

    def verdict(self, page):
        page.settle()
        return PageVerdict(float(self.answer == "4"), self.answer == "4", False)


def test_the_content_of_finished_is_the_answer_and_reaches_the_environment(browser, closing):
    env = closing(WebAgentEnv(Sum(PageEnvSettings(width_px=160, height_px=80), browser)))
    for content, reward in (("4", 1.0), ("5", 0.0), ("", 0.0)):
        env.reset({}, 0)
        (action,) = parse_answer(f"Action: finished(content='{content}')", "ui_tars").actions
        _, earned, over, _, info = env.step(action)
        assert (earned, over, info["success"], info.get("answer", "")) == (reward, True, reward > 0, content)


def test_finish_asks_the_page_and_fail_gives_up(make_env):
    env = make_env(end_when_solved=False, partial_credit=True)
    task = {"name": "todo", "seed": 1, "sub_goals": 2}
    env.reset(seed=0, options={"task": task})
    _, reward, terminated, _, info = env.step({"name": "finish", "arguments": {}})
    assert (reward, terminated, info["success"], info["progress"]) == (0.0, True, False, 0.0)
    env.reset(seed=0, options={"task": task})
    for _ in range(20):
        action = env.expert_action()
        if action.name == "finish":
            break
        _, reward, terminated, _, info = env.step(action)
        assert (reward, terminated) == (0.0, False)  # nothing before the end
        if info["progress"] == 0.5:
            half = env._report
    assert half["progress"] == 0.5
    assert env.step({"name": "fail", "arguments": {}})[1:3] == (0.0, True)


def test_partial_credit_is_the_share_of_sub_goals_where_nothing_is_broken(make_env):
    env = make_env(end_when_solved=False, partial_credit=True, distractors=2)
    for harm, worth in ((False, 0.5), (True, 0.0)):
        env.reset(seed=0, options={"task": {"name": "todo", "seed": 4, "sub_goals": 2}})
        progress = 0.0
        while progress < 0.5:
            progress = env.step(env.expert_action())[-1]["progress"]
        if harm:
            asked = {want["name"] for want in env._case.config["wanted"]}
            wrong = next(item for item in env._case.config["items"] if item["name"] not in asked)
            boxes = {element["key"]: element for element in map(vars, env.elements())}
            env.step({"name": "click", "arguments": {"point": boxes[f"delete-{wrong['id']}"]["box"].center}})
        assert env.step({"name": "finish", "arguments": {}})[1] == worth


def test_a_popup_covers_the_page_until_it_is_dismissed(make_env):
    env = make_env(disturbances=Disturbances(popup=1.0))
    env.reset(seed=3, options={"task": {"name": "todo", "seed": 0}})
    *_, info = env.step({"name": "wait", "arguments": {}})
    assert info["popup"]
    visible = [element.key for element in env.elements() if element.visible]
    assert visible == ["dismiss"]
    assert env.expert_action().name == "click"


@pytest.mark.parametrize(
    "space",
    [
        space if space in ("abs_resized", "rel1_yx") else pytest.param(space, marks=pytest.mark.slow)
        for space in CoordinateSpace
    ],
)
def test_experts_act_in_the_space_and_size_of_the_model(make_env, space):
    env = make_env(space=space, resize=Resize(factor=28), scale=1.25, max_steps=30)
    episode = run_expert(WebTaskAgentEnv(env), {"name": "checkout", "sub_goals": 2}, 3)
    assert episode.success
    assert episode.turns[0].observation.images[0].shape == (252, 308, 3)
    width, height = env.viewpoint.model_wh
    for x, y in episode.turns[0].info["marks"]:
        assert 0 <= x < width
        assert 0 <= y < height


def test_a_browser_killed_in_an_episode_is_started_again_and_counted(browser, make_env):
    env = make_env()
    first, info = env.reset(seed=7)
    restarts = info["browser_restarts"]
    browser.kill()
    _, reward, terminated, truncated, info = env.step(click(10, 10))
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert "closed" in info["env_error"]
    again, info = env.reset(seed=7)
    assert info["browser_restarts"] == restarts + 1
    assert np.array_equal(again["image"], first["image"])


def test_for_agents_a_failed_browser_raises_and_the_next_reset_works(browser, make_env):
    agent = WebTaskAgentEnv(make_env())
    observation, info = as_start(agent.reset({"name": "todo"}, 3))
    assert (observation.text, info["task"]["seed"]) == (agent.env._instruction, 3)
    outcome = as_outcome(agent.step(Action("click", {"x": 9999, "y": 0}, "")))
    assert outcome.observation.text == "The point (9999, 0) is outside of the picture."
    browser.kill()
    with pytest.raises(BrowserFailure):
        agent.step(Action("wait"))
    assert isinstance(as_start(agent.reset({"name": "todo"}, 3))[0], Observation)


def test_a_page_that_does_not_load_three_times_is_a_failure(browser, make_env, monkeypatch):
    env = make_env()
    calls, restarts = [], []

    def never(page, html):
        calls.append(html)
        raise BrowserFailure("loading the page failed")

    monkeypatch.setattr(GuardedPage, "load_html", never)
    monkeypatch.setattr(browser, "restart", lambda *_: restarts.append(1))
    with pytest.raises(BrowserFailure, match="loading the page failed"):
        env.reset(seed=0)
    assert (len(calls), len(restarts)) == (3, 2)


def test_settings_from_plain_data_and_wrong_ones():
    env = web_tasks(tasks=["login"], space="rel1000", resize={"factor": 28}, disturbances={"popup": 0.5}).env
    assert env.settings.space is CoordinateSpace.REL1000
    assert env.settings.resize == Resize(factor=28)
    assert env.settings.disturbances.popup == 0.5
    with pytest.raises(UserError, match="unknown coordinate space 'pixels'; available: abs_resized"):
        web_tasks(space="pixels")
    with pytest.raises(UserError, match=r"kwargs\.disturbances has no entry 'popups'; it has: popup, flip, delay"):
        web_tasks(disturbances={"popups": 1})
    with pytest.raises(UserError, match="unknown task 'logout'; available: login, search"):
        web_tasks(tasks=["logout"])
    with pytest.raises(UserError, match="abs_resized needs `resize`"):
        web_tasks(space="abs_resized")
    with pytest.raises(ConfigError, match=r"environment\.max_steps is 0"):
        web_tasks(max_steps=0)
    with pytest.raises(ConfigError, match=r"disturbances\.popup is 2"):
        web_tasks(disturbances={"popup": 2})


def test_tasks_that_do_not_exist(make_env):
    env = make_env()
    for task, message in (
        ({"name": "logout"}, "unknown task 'logout'"),
        ({"name": "login", "goals": 1}, "no entry 'goals'"),
        (["login"], "the task is a list"),
    ):
        with pytest.raises(UserError, match=message):
            env.reset(seed=0, options={"task": task})


def test_expert_episodes_and_a_video_on_disk(make_env, tmp_path):
    agent = WebTaskAgentEnv(make_env(tasks=("mail",), sub_goals=1))
    episodes = [run_expert(agent, {}, seed) for seed in range(2)]
    write_episodes(episodes, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    assert [row["success"] for row in rows] == [True, True]
    assert len(list((tmp_path / "videos").iterdir())) == 1
    frames = list(draw_frames(episodes[0].video()))
    x, y = episodes[0].turns[0].info["marks"][0]
    red = (frames[0][:, :, 0].astype(int) - frames[0][:, :, 1]) > 100
    assert red[int(y) - 12 : int(y) + 12, int(x) - 12 : int(x) + 12].any()


def test_gymnasiums_own_check(make_env):
    assert set(ENVIRONMENT_IDS) <= set(gymnasium.registry)
    env = make_env(tasks=("login",), max_steps=3)
    check_env(env, skip_render_check=True)
