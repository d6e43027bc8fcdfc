"""What the blocks of an objective read of a response: its tokens, and the number of its answer."""

import dataclasses

import pytest
import torch

from mmrl.core import get
from mmrl.core.blocks.turns import Weight
from mmrl.rewards.answers import number_answers
from mmrl.training import objectives
from mmrl.training.processes import Streams, make_accelerator
from mmrl.training.recipe import Step
from mmrl.training.trainer import Trainer
from mmrl.vlm.data.prompt import VlmPayload, token_lists
from mmrl.vlm.engine.vlm_sampler import sample
from mmrl.vlm.vlm_recipe import VlmRecipe
from tests.contracts.domains import DOMAINS


@dataclasses.dataclass(frozen=True)
class Reader(Weight):
    kind = "reader"
    needs = frozenset({"tokens", "answers"})

    def __call__(self, rollouts):
        assert rollouts.extras["answer"].dtype == rollouts.extras["tokens"].dtype == torch.int64
        return torch.ones_like(rollouts.mask)


@pytest.fixture
def trainer(tmp_path):
    config = DOMAINS["vlm"].make_config("vlm", tmp_path)
    recipe = VlmRecipe(config)
    made = Trainer(recipe, config, tmp_path / "run", make_accelerator(), None)
    yield made
    recipe.close()


def test_tokens_and_answers_are_read_where_a_block_needs_them(trainer):
    recipe = trainer.recipe
    assert not {"tokens", "answer"} & trainer.collect()[0].extras.keys()
    recipe.objective = recipe.objective.replace(weight=Reader())
    rollouts = trainer.collect()[0]
    payload = VlmPayload.of(rollouts)
    mask = rollouts.mask > 0
    assert torch.equal(rollouts.extras["tokens"][mask], payload.response_ids[mask])
    pairs = {(group, text) for group, text in zip(rollouts.group.tolist(), payload.texts, strict=True)}
    numbers = set(zip(rollouts.group.tolist(), rollouts.extras["answer"].tolist(), strict=True))
    assert len(numbers) == len(pairs), "untrained answers have no marks: whole responses are compared"
    recipe.objective.compute_advantages(rollouts)


def test_remax_compares_with_a_greedy_answer_and_samples_the_same_others(trainer):
    recipe, step, streams = trainer.recipe, Step(1, 2), Streams(5, [0, 1])
    tasks = VlmPayload.of(trainer.collect()[0]).tasks
    plain = recipe.rollout(trainer.policy, tasks, streams, step)
    recipe.objective = get("remax")
    rollouts = recipe.score(recipe.rollout(trainer.policy, tasks, streams, step), step)
    payload = VlmPayload.of(rollouts)
    assert torch.equal(payload.response_ids, VlmPayload.of(plain).response_ids), "the greedy answer takes no draw"
    found = sample(trainer.policy, payload.prompts, 1, recipe.config.sampler, None)
    assert [text for text, _ in payload.greedy] == found.texts
    tokens = token_lists(found.response_ids, found.mask)
    reward = torch.tensor(recipe.score_texts(payload.tasks, found.texts, tokens, step).total)
    assert torch.equal(rollouts.extras["greedy_reward"], reward[rollouts.group])
    advantage = recipe.objective.compute_advantages(rollouts).advantage
    expected = (rollouts.reward - reward[rollouts.group])[:, None].expand_as(advantage)
    assert torch.equal(advantage[rollouts.mask > 0], expected[rollouts.mask > 0])
    last = rollouts.select_groups(torch.tensor([1]))
    assert VlmPayload.of(last).greedy == payload.greedy[1:2]


def test_equal_answers_of_a_group_share_a_number():
    texts = ["<think>a</think><answer>7</answer>", r"so \boxed{7}.", "<answer>8</answer>", "no mark", "No mark.", "x"]
    texts += ["<answer>7</answer><answer>8</answer>", "<answer>8</answer>"]
    groups = [0, 0, 0, 0, 0, 0, 0, 1]
    assert number_answers(groups, [""] * 8, texts) == [0, 0, 1, 2, 2, 3, 4, 0]


@pytest.mark.parametrize("room", ["diffusion", "robotics"])
def test_rooms_without_text_refuse_by_name(room, monkeypatch):
    objective = objectives.make_objective(objectives.ObjectiveConfig()).replace(weight=Reader(), kl=None)
    monkeypatch.setitem(objectives.BLOCKS["weight"], "reader", Reader)
    with pytest.raises(ValueError, match=r"objective\.weight is 'reader', which needs the final answers"):
        objectives.check_objective(objective, DOMAINS[room].scores)
