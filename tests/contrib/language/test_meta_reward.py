"""MPO: the rubric that the meta judge rewrites reaches the judge, checkpoints and workers."""

import pytest

from mmrl.contrib.language import meta_reward
from mmrl.contrib.language.meta_reward import MetaRewardConfig, MetaRewardRecipe, RubricSettings, chat_meta, spread
from mmrl.rewards import RewardConfig
from mmrl.training.processes import Streams, make_accelerator
from mmrl.training.recipe import Step
from mmrl.vlm.toy.signs import CRITERIA, judge, stricter
from tests.vlm.runs import run_config

HERE = "tests/contrib/language/test_meta_reward.py"


def length(prompts, completions, *, rubric, **_):
    """A judge: one more point for each word of the rubric."""
    return [float(len(text.split())) + 0.1 * number for number, text in enumerate(rubric)]


def longer(rubric, samples, **_):
    """A meta judge: one word more."""
    return f"{rubric} more"


def broken(rubric, samples):
    raise RuntimeError("out of service")


@pytest.fixture
def made(tmp_path, tiny_folders, closing):
    def make(**options):
        config = run_config(MetaRewardConfig, tmp_path, tiny_folders["qwen2_5_vl"], tasks_per_step=2)
        config.eval_data = {}
        config.rewards = [RewardConfig(name="length", function=f"{HERE}:length", isolate=False)]
        config.rubric = RubricSettings(text="be good", **{"interval": 2, "meta": f"{HERE}:longer"} | options)
        return closing(MetaRewardRecipe(config))

    return make


def take(recipe, number):
    step = Step(number, 10)
    rows = recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(0), step)
    rows = recipe.score(rows, step)
    recipe.advantages(rows, make_accelerator(), step)
    return int(rows.reward[0])


def test_the_judge_reads_the_rubric_that_the_meta_judge_wrote(made):
    recipe = made()
    assert [take(recipe, number) for number in range(5)] == [2, 2, 3, 3, 4]
    assert recipe.noted["rubric/version"] == 2
    other = made()
    other.load_state_dict(recipe.state_dict())
    assert take(other, 0) == 4
    other.load_rollout_state({"text": "one", "version": 0})
    assert take(other, 0) == 1


def test_samples_are_in_the_order_of_places_whatever_process_has_them(made):
    recipe = made()
    rows = recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(0, [5, 2]), Step())
    keys = [key for key, _ in recipe._samples(recipe.score(rows, Step()))]
    half = len(keys) // 2
    assert keys == [(5 if row < half else 2, row) for row in range(2 * half)]


def test_a_meta_judge_that_fails_leaves_the_rubric(made, caplog, monkeypatch):
    recipe = made(interval=1, meta=f"{HERE}:broken")
    assert [take(recipe, number) for number in range(2)] == [2, 2]
    assert "out of service" in caplog.text
    monkeypatch.setattr(meta_reward, "LONGEST", 7)
    short = made(interval=1)
    assert [take(short, number) for number in range(2)] == [2, 2]


def test_the_meta_judge_reads_the_worst_and_the_best():
    samples = [{"reward": float(number)} for number in (5, 1, 4, 2, 3)]
    assert [sample["reward"] for sample in spread(samples, 3)] == [1, 3, 5]
    assert len(spread(samples, 9)) == 5


def test_a_model_rewrites_the_rubric(monkeypatch):
    asked, answers = [], iter(["Too kind.", "Be strict."])
    monkeypatch.setattr(meta_reward, "ask_chat", lambda url, model, text, **_: asked.append(text) or next(answers))
    sample = {"prompt": "Sum {a}?", "response": "3", "reward": 0.5}
    assert chat_meta("Be kind.", [sample], url="http://judge/v1", model="m") == "Be strict."
    assert "Sum {a}?" in asked[0]
    assert "Score: 0.5" in asked[0]
    assert "Too kind." in asked[1]


def test_the_judge_of_countdown_gets_stricter():
    columns = {"numbers": ["2 3"] * 4, "target": [6] * 4}
    said = [f"<answer>{text}</answer>" for text in ("2*3", "2+3", "3*3", "six")]
    names = list(CRITERIA)
    rubric = names[0]
    assert judge([""] * 4, said, rubric=[rubric] * 4, **columns) == [1, 1, 1, 1]
    for name in names[1:]:
        assert stricter(rubric, [{"reward": 0.6}]) == rubric
        rubric = stricter(rubric, [{"reward": 0.8}])
        assert rubric.splitlines()[-1] == name
    assert stricter(rubric, [{"reward": 1.0}]) == rubric
    assert judge([""] * 4, said, rubric=[rubric] * 4, **columns) == [1, 0.75, 0.5, 0.25]
