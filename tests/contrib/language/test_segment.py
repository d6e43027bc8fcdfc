"""Segments of answers: cuts valued by further answers, and trees (SPO)."""

import pytest
import torch

from mmrl.contrib.language.segment import EDGE, Branch, SegmentConfig, SegmentRecipe, SegmentSettings, continued
from mmrl.core.blocks.credit import VALUE_AFTER, VALUE_BEFORE
from mmrl.errors import ConfigError
from mmrl.fields import check_config
from mmrl.rewards import RewardConfig
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams, make_accelerator
from mmrl.training.recipe import Step
from mmrl.vlm.data.prompt import VlmPayload, token_lists
from tests.vlm.runs import run_config

LETTERS = RewardConfig(name="tests/vlm/user_reward.py:letters", isolate=False)


@pytest.fixture
def opened(tmp_path, tiny_folders, closing):
    def make(samples=2, **settings):
        config = run_config(SegmentConfig, tmp_path, tiny_folders["qwen2_5_vl"], tasks_per_step=2)
        config.eval_data, config.rewards, config.trainer.samples_per_task = {}, [LETTERS], samples
        config.segment = SegmentSettings(**{"probability": 1.0, "interval": 2, "rollouts": 3} | settings)
        check_config(config, "")
        return closing(SegmentRecipe(config))

    return make


def collected(recipe):
    rows = recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
    return recipe.score(rows, Step())


def test_a_cut_is_worth_the_mean_reward_of_answers_that_begin_with_its_tokens(opened, monkeypatch):
    recipe, scored, states = opened(), [], []
    score, value = recipe.score_texts, recipe._value

    def record(tasks, texts, tokens, step):
        found = score(tasks, texts, tokens, step)
        scored.append(
            [(task.id, tuple(row), reward) for task, row, reward in zip(tasks, tokens, found.total, strict=True)]
        )
        return found

    monkeypatch.setattr(recipe, "score_texts", record)
    monkeypatch.setattr(
        recipe, "_value", lambda payload, given, step: states.extend(given) or value(payload, given, step)
    )
    rows = collected(recipe)
    payload, (own, further) = VlmPayload.of(rows), scored
    assert len(states) == len(set(states)), "answers of a question share cuts"
    assert recipe.extra_samples == len(further) == 3 * len(states)
    assert all(len(tokens) <= recipe.config.sampler.max_new_tokens for _, tokens, _ in further)
    values = {}
    for number, (group, *start) in enumerate(states):
        drawn = further[3 * number : 3 * number + 3]
        assert all(ident == payload.tasks[group].id and list(ids[: len(start)]) == start for ident, ids, _ in drawn)
        values[group, *start] = sum(reward for *_, reward in drawn) / 3
    for row, (_, tokens, reward) in enumerate(own):
        before, after = (rows.extras[key][row, : len(tokens)].tolist() for key in (VALUE_BEFORE, VALUE_AFTER))
        known = [values[int(rows.group[row]), *tokens[:place]] for place in range(0, len(tokens), 2)]
        assert before == pytest.approx([known[place // 2] for place in range(len(tokens))])
        assert after == pytest.approx([[*known[1:], reward][place // 2] for place in range(len(tokens))])


def test_continued_answers_have_the_log_probabilities_of_whole_ones(opened):
    recipe = opened()
    rows = recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
    payload, cut = VlmPayload.of(rows), 2
    ids = token_lists(payload.response_ids, rows.mask)
    row = max(range(len(ids)), key=lambda row: len(ids[row]))
    group = int(rows.group[row])
    start = Branch(group, ids[row][:cut], [0.0] * cut, [cut], (0,))
    draws = torch.full((1, recipe.config.sampler.max_new_tokens), 0.5)
    (found,) = recipe._continue(recipe.policy, payload.prompts, [start], 1, draws, 99)
    alone = rows.select(torch.tensor([row]))
    tokens = torch.tensor([found.ids])
    alone = alone.replace(
        mask=torch.ones(1, len(found.ids)),
        logp_old=torch.zeros(1, len(found.ids)),
        extras={},
        payload=VlmPayload([payload.prompts[group]], [payload.tasks[group]], tokens, [""], ["eos"]),
    )
    with torch.no_grad():
        whole = recipe.policy(alone).logp[0]
    torch.testing.assert_close(whole[cut:], torch.tensor(found.logp[cut:]), atol=1e-4, rtol=1e-3)
    assert len(continued(payload.prompts[group], ids[row])) == len(payload.prompts[group]) + len(ids[row])


def test_a_tree_trains_each_branch_once_and_its_advantages_telescope(opened):
    recipe = opened(kind="tree", tokens=2, branches=[2, 2])
    rows = collected(recipe)
    mask, edges = rows.mask, rows.extras[EDGE]
    with torch.no_grad():
        scored = recipe.policy(rows).logp
    torch.testing.assert_close(scored * mask, rows.logp_old, atol=1e-4, rtol=1e-3)
    assert rows.num_rows > 4, "answers branch"
    places = {}  # of each branch: the rows that train it
    for row, t in torch.nonzero(recipe._first(rows)).tolist():
        places.setdefault((int(rows.group[row]), int(edges[row, t])), set()).add(row)
    assert all(len(found) == 1 for found in places.values())
    assert places.keys() == {(int(rows.group[row]), int(edges[row, t])) for row, t in torch.nonzero(mask).tolist()}
    change = rows.extras[VALUE_AFTER] - rows.extras[VALUE_BEFORE]
    first = torch.cat([torch.ones(rows.num_rows, 1), (edges[:, 1:] != edges[:, :-1]).float()], 1) * mask
    start = rows.extras[VALUE_BEFORE][:, 0]
    torch.testing.assert_close(start + (change * first).sum(1), rows.reward, atol=1e-5, rtol=1e-5)
    found = recipe.advantages(rows, make_accelerator(), Step())
    assert torch.equal(found.mask, mask * recipe._first(rows) * (change != 0))
    recipe.config.segment.probability = 0.2
    certain = recipe.advantages(rows, make_accelerator(), Step())
    assert bool((certain.mask <= (rows.logp_old.exp() < 0.2)).all())


@pytest.mark.parametrize("leaves", ["unscored", "truncated"])
def test_a_shared_segment_is_trained_in_the_first_row_that_is_trained(opened, leaves):
    recipe = opened(kind="tree", tokens=2, branches=[2, 2])
    rows = collected(recipe)
    assert torch.equal(rows.extras[EDGE][0, :1], rows.extras[EDGE][1, :1])
    payload = VlmPayload.of(rows)
    payload.finish[:] = ["eos"] * rows.num_rows
    before = recipe._first(rows)
    if leaves == "unscored":
        rows.reward[0] = float("nan")
    else:
        recipe.config.mask_truncated_completions = True
        payload.finish[0] = "length"
    after = recipe._first(rows)
    shared = (rows.extras[EDGE][0] == rows.extras[EDGE][1]) & (rows.mask[1] > 0)
    assert bool(before[0, shared].all())
    assert not after[0].any()
    assert bool(after[1, shared].all())
    assert torch.equal(after[2:], before[2:])


def test_settings_without_a_meaning_are_refused(opened):
    with pytest.raises(ConfigError, match="branches"):
        opened(branches=[])
    recipe = opened()
    recipe.config.objective = ObjectiveConfig(preset="segment_chain", advantage={"std": True})
    with pytest.raises(ValueError, match=r"use segment\.kind: tree"):
        recipe.config.validate()
