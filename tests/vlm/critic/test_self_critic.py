import json

import pytest
import torch

from mmrl.errors import UserError
from mmrl.fields import check_config
from mmrl.recipes import RECIPES
from mmrl.training.run import train
from mmrl.vlm.critic import self_critic
from mmrl.vlm.critic.self_critic import SelfCriticConfig, best_of_n
from mmrl.vlm.engine.vlm_sampler import SamplerConfig, sample
from mmrl.vlm.vlm_config import VlmConfig
from tests.vlm.builders import make_task
from tests.vlm.pairs import pair_config
from tests.vlm.runs import run_config

MODEL = "qwen2_5_vl"
TEMPLATE = "{{ question }} 1: {{ first }} 2: {{ second }}"
SAMPLER = SamplerConfig(max_new_tokens=4)


class Scripted:
    """Replaces the sampler: answers critic questions by a rule, and records the questions."""

    def __init__(self, rule):
        self.rule, self.asked = rule, []

    def __call__(self, policy, prompts, count, config, draws):
        assert draws is None
        assert count == 1
        self.asked += [prompt.text for prompt in prompts]
        texts = [f"<think>.</think>\\boxed{{{self.rule(prompt.text)}}}" for prompt in prompts]
        return type("Said", (), {"texts": texts})


def boxed(answer):
    return f"<think>so</think>\\boxed{{{answer}}}"


def place_of(text, wanted):
    """1 if the wanted answer is shown as number 1."""
    return 1 if text.split(" 1: ")[1].startswith(wanted) else 2


@pytest.fixture
def tasks():
    return [make_task("one", "Sum?", [(64, 64)]), make_task("none", "Look.")]


def test_the_critics_choice_is_kept_whatever_the_order(policies, tasks, monkeypatch):
    judge = Scripted(lambda text: place_of(text, "8"))
    monkeypatch.setattr(self_critic, "sample", judge)
    responses = [[boxed(7), boxed(8), "no answer", boxed("7")], [boxed(3)] * 4]
    config = SelfCriticConfig(template=TEMPLATE, shown="answer")
    one, same = best_of_n(policies[MODEL], tasks, responses, config, SAMPLER)
    assert (one.chosen, one.majority, one.answers) == (1, 0, ["7", "8"])
    assert [verdict.agrees for verdict in one.verdicts] == [True]
    assert (same.chosen, same.majority, same.verdicts) == (0, 0, [])
    assert len(judge.asked) == 2, "one pair in both orders; equal answers are not compared"
    assert judge.asked[0].count("<|image_pad|>") == 1
    assert "1: 7 2: 8" in judge.asked[0]
    assert "1: 8 2: 7" in judge.asked[1]


def test_a_critic_that_always_says_1_is_a_majority_vote(policies, tasks, monkeypatch):
    monkeypatch.setattr(self_critic, "sample", Scripted(lambda text: 1))
    responses = [[boxed(8), boxed(7), boxed(7)], [boxed(1), boxed(2)]]
    for protocol in ("round_robin", "knockout"):
        config = SelfCriticConfig(template=TEMPLATE, protocol=protocol)
        found = best_of_n(policies[MODEL], tasks, responses, config, SAMPLER)
        assert [one.chosen for one in found] == [one.majority for one in found] == [1, 0]
        assert not any(verdict.agrees for one in found for verdict in one.verdicts)


def test_whole_responses_are_shown_without_marks_of_media(policies, tasks, monkeypatch):
    judge = Scripted(lambda text: 2)
    monkeypatch.setattr(self_critic, "sample", judge)
    responses = [["<image> 7", "<video> 8"], ["a", "b"]]
    best_of_n(policies[MODEL], tasks, responses, SelfCriticConfig(template=TEMPLATE), SAMPLER)
    assert "1: image 7 2: video 8" in judge.asked[0]


def test_a_question_too_long_for_the_model_is_a_draw(policies, tasks):
    long = ["w" * 1200, "o" * 1200, "o" * 1200]
    (found,) = best_of_n(policies[MODEL], tasks[:1], [long], SelfCriticConfig(template=TEMPLATE), SAMPLER)
    assert found.verdicts == [self_critic.PairVerdict(None, None)]
    assert found.chosen == found.majority


def test_real_judgements_are_the_likeliest_and_repeat(policies, tasks):
    policy = policies[MODEL]
    drawn = sample(policy, [policy.encode(task) for task in tasks], 3, SAMPLER, torch.Generator().manual_seed(1))
    responses = [drawn.texts[:3], drawn.texts[3:]]
    first, second = (best_of_n(policy, tasks, responses, SelfCriticConfig(), SAMPLER) for _ in range(2))
    assert first == second


def critic_config(folder, model, **changes):
    config = run_config(VlmConfig, folder, model)
    config.evaluation.self_critic = SelfCriticConfig(n=3, template=TEMPLATE, **changes)
    return config


def test_the_evaluation_compares_all_four_on_the_same_answers(tmp_path, tiny_folders):
    config = critic_config(tmp_path, tiny_folders[MODEL])
    run_dir = train(RECIPES["vlm"], config)
    last = [json.loads(line) for line in (run_dir / "evaluations.jsonl").open()][-1]
    names = ("self_critic", "majority", "pass_at_1", "pass_at_n")
    assert all(0 <= last[f"accuracy/{name}"] <= 1 for name in names)
    assert last["accuracy/pass_at_1"] <= last["accuracy/pass_at_n"]
    assert 1 <= last["self_critic/different"] <= 3
    outcomes = [json.loads(line) for line in (run_dir / "outcomes/step-000002/heldout.jsonl").open()]
    assert len(outcomes) == 6
    assert {"accuracy/greedy", "accuracy/self_critic"} <= set(outcomes[0]["scores"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"splits": ["reading"]},
            "evaluation.self_critic.splits contains unknown splits: reading; splits of eval_data: heldout",
        ),
        ({"shown": "thought"}, "evaluation.self_critic.shown is 'thought'; allowed: response, answer"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_model_is_loaded(tmp_path, changes, message):
    config = critic_config(tmp_path, tmp_path / "no-model", **changes)
    with pytest.raises(ValueError, match=message):
        check_config(config)


def test_a_wording_that_loses_a_response_is_refused():
    with pytest.raises(UserError, match=r"evaluation.self_critic.template never uses \{\{ second \}\}"):
        SelfCriticConfig(template="{{ question }} {{ first }}").validate()


def test_an_evaluation_without_rewards_cannot_score_choices(tmp_path, tiny_folders):
    config = pair_config(tmp_path, tiny_folders[MODEL])
    config.evaluation.self_critic = SelfCriticConfig()
    with pytest.raises(ValueError, match=r"evaluation\.self_critic is set, but rewards is empty"):
        config.validate()
