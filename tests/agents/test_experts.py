import json
import random

import gymnasium
import numpy as np
import pytest
from PIL import Image

from mmrl.agents.environments.environment import FORMATS, Action, parse_answer, write_answer
from mmrl.agents.environments.experts import NoisyExpert, run_expert, write_episodes
from mmrl.agents.environments.gym import GymEnvironment, action_reader
from mmrl.agents.toy.grid import MOVES, GridWorld
from mmrl.errors import UserError
from tests.agents.test_gym_env import ARGUMENTS, BOX, Room


def value(draw, depth=0):
    kinds = [
        lambda: draw.randrange(-(10**6), 10**6),
        lambda: draw.uniform(-1e3, 1e3),
        lambda: "".join(draw.choices("aé'\"\\\n\t ()=,{}[]<>/:", k=draw.randrange(6))),
        lambda: draw.choice([True, False, None]),
        lambda: [value(draw, depth + 1) for _ in range(draw.randrange(3))],
        lambda: {key: value(draw, depth + 1) for key in draw.sample(["a", "b c", "é"], draw.randrange(3))},
    ]
    return draw.choice(kinds[: 4 if depth > 2 else 6])()


def test_the_format_text_says_one_thing_only():
    assert write_answer([Action("say", {"text": "go north"})], "text") == "go north"
    for thought, actions in (("so be it", [Action("say", {"text": "x"})]), ("", [Action("up")]), ("", [])):
        with pytest.raises(ValueError, match="can only express one action"):
            write_answer(actions, "text", thought)


@pytest.mark.parametrize("format", ["json", "call", "tag"])
def test_what_is_written_is_read_again_in_both_modes(format):
    draw = random.Random(0)
    for _ in range(300):
        count = draw.randrange(1, 4)
        actions = [Action("act", {key: value(draw) for key in draw.sample("xyz", draw.randrange(4))})] * count
        if format == "tag" and any("</action>" in repr(action.arguments) for action in actions):
            continue
        text = write_answer(actions, format, "so be it")
        for strict in (True, False):
            found = parse_answer(text, format, strict=strict, max_actions=count)
            assert [(action.name, action.arguments) for action in found.actions] == [
                (action.name, action.arguments) for action in actions
            ], text
            assert found.thought == "so be it"


def test_examples_equal_the_written_text():
    assert (
        write_answer([Action("click", {"x": 10, "y": 20})], "call", "The button is below.") == FORMATS["call"].example
    )
    assert write_answer([Action("up")], "tag", "The goal is above.") == FORMATS["tag"].example
    assert write_answer([Action("forward")], "json", "The door is ahead.") == FORMATS["json"].example
    assert write_answer([Action("3")], "tag") == "<action>3</action>"


@pytest.mark.parametrize(
    ("action", "format"),
    [
        (Action("move up"), "call"),
        (Action("a", {"b c": 1}), "call"),
        (Action("a", {"x": float("nan")}), "json"),
        (Action("a", {"x": float("inf")}), "call"),
        (Action("a</action>"), "tag"),
        (Action(""), "json"),
    ],
)
def test_actions_that_a_format_cannot_express_are_refused(action, format):
    with pytest.raises(ValueError):
        write_answer([action], format)


def test_members_of_spaces_are_written_as_actions():
    for space in (gymnasium.spaces.Discrete(3, start=2), gymnasium.spaces.Text(4), BOX, ARGUMENTS):
        reader = action_reader(space, None)
        space.seed(0)
        for _ in range(10):
            member = space.sample()
            again = reader.read(reader.write(member))
            assert space.contains(again)
            np.testing.assert_equal(again, member)


def test_the_expert_of_the_grid_solves_it_and_is_written_down(tmp_path):
    env = GymEnvironment(GridWorld(size=3, cell=8, key=True, max_steps=20))
    episodes = [run_expert(env, {"name": "grid"}, seed, "tag") for seed in range(3)]
    for episode in episodes:
        assert (episode.success, episode.reward) == (True, 1.0)
        assert episode.instruction == "Fetch the yellow key, then go to the green square."
        assert all(turn.action.text == f"<action>{turn.action.name}</action>" for turn in episode.turns)
    write_episodes(episodes, tmp_path, videos=2)
    rows = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    assert [row["seed"] for row in rows] == [0, 1, 2]
    for row, episode in zip(rows, episodes, strict=True):
        assert [turn["answer"] for turn in row["turns"]] == [turn.action.text for turn in episode.turns]
        picture = np.asarray(Image.open(tmp_path / row["turns"][0]["images"][0]))
        np.testing.assert_array_equal(picture, episode.turns[0].observation.images[0])
    assert sorted(path.name for path in (tmp_path / "videos").iterdir()) == [
        "expert-success-grid.0.mp4",
        "expert-success-grid.1.mp4",
    ]


class Early:
    """Reports in its first turn whether it succeeds, and ends in its second."""

    def reset(self, task, seed):
        self.reports, self.turns = task["success"], 0
        return "go"

    def step(self, action):
        self.turns += 1
        info = {"success": self.reports} if self.turns == 1 else {}
        return "go", 1.0, self.turns == 2, info

    def expert(self):
        return Action("go")

    def close(self):
        pass


@pytest.mark.parametrize("success", [True, False])
def test_the_last_report_of_success_holds(success):
    assert run_expert(Early(), {"success": success}, 0).success is success


def test_without_an_expert_there_are_no_demonstrations():
    env = GymEnvironment(Room(gymnasium.spaces.Text(3)))
    with pytest.raises(UserError, match="Room has no method expert_action that returns a member of its action space"):
        run_expert(env, {}, 0)


def test_a_noisy_expert_errs_at_the_given_rate():
    for share in (0.0, 0.5, 1.0):
        env = NoisyExpert(GymEnvironment(GridWorld(min_distance=8)), list(MOVES), share, random.Random(0))
        env.reset({}, 3)
        right = env._env.expert().name
        same = sum(env.expert().name == right for _ in range(400)) / 400
        assert abs(same - (1 - 0.75 * share)) < 0.07, "a random move is the right one in a quarter of the cases"
