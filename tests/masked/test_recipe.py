"""The recipes of masked-diffusion models: losses, hints for questions that every sample misses, refusals."""

import itertools

import pytest
import torch

from mmrl.core.blocks.foreign import HINTED, SOURCE, HintedEntropy
from mmrl.core.rollouts import Rollouts
from mmrl.masked.inpainting import cut, hinted_answer
from mmrl.masked.masked_config import InpaintingConfig, LikelihoodConfig, splits
from mmrl.masked.masked_policy import MaskedPayload
from mmrl.masked.masked_recipe import TIME, MaskedRecipe, MaskedSftRecipe
from mmrl.masked.masked_sampler import MaskedSampling, propose, step_shares, unmask
from mmrl.rewards import RewardConfig
from mmrl.training.objectives import ObjectiveConfig, make_objective
from mmrl.training.processes import Streams, make_accelerator
from mmrl.training.recipe import Step
from mmrl.training.rollers import Unit, sampled
from mmrl.training.update import count_denominators
from tests.contracts.domains import DOMAINS

STREAMS = Streams(7)


def config_of(name, folder, **changes):
    config = DOMAINS["masked"].make_config(name, folder)
    for key, value in changes.items():
        setattr(config, key, value)
    config.validate()
    return config


def mostly_wrong(prompts, completions, **columns):
    """Right where the answer holds the thought's end, which a random model hardly writes by itself."""
    return [float("</think>" in text) for text in completions]


HERE = f"{__name__}:mostly_wrong"


def test_failed_questions_are_answered_around_hints_and_only_right_ones_replace(tmp_path, closing):
    rewards = [RewardConfig(name="right", function=HERE, isolate=False)]
    # the whole worked answer but a rest is given, and with it the end of the thought
    hints = InpaintingConfig(replacements=2, low=1.0, high=1.0, min_chunk=1, max_chunk=2, free=0, stretch=1.0)
    config = config_of(
        "masked",
        tmp_path,
        rewards=rewards,
        inpainting=hints,
        sampler=MaskedSampling(max_new_tokens=24, block=8, steps=6),
    )
    recipe = closing(MaskedRecipe(config))
    recipe.policy.eval()
    tasks = recipe.train_tasks[:2]
    rollouts = sampled(recipe, Unit(tasks, STREAMS, Step()), make_accelerator()).rollouts
    payload = MaskedPayload.of(rollouts)
    replaced = rollouts.extras[SOURCE] == 1
    assert replaced.view(2, 3).tolist() == [[True, True, False]] * 2
    assert rollouts.reward.tolist() == replaced.float().tolist()
    hinted = rollouts.extras[HINTED]
    assert hinted[replaced].sum(1).min() > 3
    assert hinted[~replaced].sum() == 0
    tokenizer = recipe.policy.processor.tokenizer
    for row in torch.nonzero(replaced).flatten().tolist():
        trace = tokenizer.encode(tasks[row // 3].columns["completion"])
        given = [
            token for token, at in zip(payload.response_ids[row].tolist(), hinted[row].tolist(), strict=True) if at
        ]
        assert given == trace[: len(given)]
    assert recipe.extra_samples == 6


def test_without_inpainting_nothing_is_replaced(tmp_path, closing):
    config = config_of("masked", tmp_path, inpainting=InpaintingConfig())
    recipe = closing(MaskedRecipe(config))
    rollouts = sampled(recipe, Unit(recipe.train_tasks[:2], STREAMS, Step()), make_accelerator()).rollouts
    assert rollouts.extras[SOURCE].sum() == 0
    assert rollouts.extras[HINTED].sum() == 0


def test_the_supervised_loss_weighs_masked_tokens_by_the_inverse_time(tmp_path, closing):
    recipe = closing(MaskedSftRecipe(config_of("masked_sft", tmp_path)))
    with torch.no_grad():
        rollouts = recipe.batch(recipe.policy, recipe.train_tasks[:3], STREAMS, Step())
        payload, time = MaskedPayload.of(rollouts), rollouts.extras[TIME]
        counts = count_denominators(recipe, rollouts)
        loss = float(recipe.loss(recipe.policy, rollouts, counts, Step()).loss)
        expected = 0.0
        for row in range(3):
            hidden, tokens = payload.hidden[row, 0], payload.response_ids[row]
            answer = tokens.masked_fill(hidden, recipe.policy.mask_id)
            logp = recipe.policy.logits([payload.prompts[row]], answer[None])[0].log_softmax(-1)
            own = logp.gather(1, tokens[:, None])[:, 0]
            expected -= float((own * hidden).sum() / time[row]) / 24 / 3
    assert loss == pytest.approx(expected, rel=1e-4)
    assert 0 < payload.hidden.float().mean() < 1


def test_an_answer_longer_than_a_response_is_skipped_and_counted(tmp_path, closing):
    """It would be learned without its result; one that only lacks its end token is whole."""
    config = config_of("masked_sft", tmp_path)
    recipe = closing(MaskedSftRecipe(config))
    sizes = {
        task.id: len(recipe.policy.encode_answer(recipe.policy.encode(task), task.columns["completion"], ends=False))
        for task in recipe.train_tasks
    }
    assert len(set(sizes.values())) > 1
    config.evaluation.sampler = MaskedSampling(min(sizes.values()), min(sizes.values()), 1)
    payload = MaskedPayload.of(recipe.batch(recipe.policy, recipe.train_tasks, STREAMS, Step()))
    whole = [name for name, size in sizes.items() if size == min(sizes.values())]
    assert [task.id for task in payload.tasks] == whole
    assert recipe.skipped == {"long_answer": len(sizes) - len(whole)}
    decode = recipe.policy.turns.decode
    assert decode(payload.response_ids.tolist()) == [task.columns["completion"] for task in payload.tasks]


def test_chunks_cut_draws_of_an_update_and_leave_its_denominators(tmp_path, closing):
    config = config_of(
        "masked",
        tmp_path,
        objective=ObjectiveConfig(preset="bgpo"),
        likelihood=LikelihoodConfig(kind="elbo", draws=5, chunk=2),
    )
    recipe = closing(MaskedRecipe(config))
    rollouts = recipe.rollout(recipe.policy.eval(), recipe.train_tasks[:2], STREAMS, Step())
    assert rollouts.mask.shape == (6, 5)
    parts = list(recipe.micro_batches(rollouts, 6, whole_groups=False))
    assert [part.mask.sum(1).tolist() for part in parts] == [[2.0] * 6, [2.0] * 6, [1.0] * 6]
    assert torch.equal(sum(part.mask for part in parts), rollouts.mask)
    assert "5 draws" in recipe.describe()


def test_bounds_are_those_of_answers_or_of_a_token(tmp_path):
    found = []
    for per_token in (False, True):
        likelihood = LikelihoodConfig(kind="elbo", draws=3, per_token=per_token)
        objective = ObjectiveConfig(preset="bgpo")
        recipe = MaskedRecipe(config_of("masked", tmp_path, objective=objective, likelihood=likelihood))
        rollouts = recipe.rollout(recipe.policy.eval(), recipe.train_tasks[:2], STREAMS, Step())
        found.append(recipe.scores(recipe.policy, rollouts, frozenset({"logp", "entropy"})))
        recipe.close()
    for name in ("logp", "entropy"):
        torch.testing.assert_close(
            getattr(found[0], name), rollouts.payload.response_ids.shape[1] * getattr(found[1], name)
        )


def test_hinted_tokens_count_where_the_policy_is_least_sure():
    hinted = torch.tensor([[1.0, 1, 1, 1, 1, 0], [0.0] * 6])
    entropy = torch.tensor([[0.1, 0.9, 0.3, 0.8, 0.2, 0.0], [0.5] * 6])
    ones = torch.ones(2, 6)
    rollouts = Rollouts(torch.zeros(2).long(), ones, ones, torch.zeros(2), entropy=entropy, extras={HINTED: hinted})
    weight = HintedEntropy(0.4)(rollouts)
    kept = torch.tensor([[0.0, 1, 0, 1, 0, 1], [1.0] * 6])
    torch.testing.assert_close(weight, kept * 12 / 9)
    assert HintedEntropy(0.01)(rollouts)[0].gt(0).tolist() == [False, True, False, False, False, True]


def test_a_step_fills_in_its_share_of_the_surest_tokens():
    assert step_shares(torch.tensor([8, 5, 0]), 3).tolist() == [[3, 3, 2], [2, 2, 1], [0, 0, 0]]
    answers = torch.tensor([[9, 0, 0, 0]])
    sure = torch.tensor([[1.0, 0.2, 0.9, 0.5]])
    found = unmask(answers, torch.tensor([[1, 2, 3, 4]]), sure, torch.tensor([2]), mask_id=0)
    assert found.tolist() == [[9, 0, 3, 4]]


def test_tokens_are_drawn_at_the_temperature_and_weighed_without_it():
    logits = torch.tensor([0.0, 1.0, 2.0]).expand(1, 20000, 3)
    uniform = torch.rand(1, 20000, generator=torch.Generator().manual_seed(0))
    token, sure = propose(logits, uniform, 2.0)
    shares = torch.bincount(token[0], minlength=3) / 20000
    torch.testing.assert_close(shares, (logits[0, 0] / 2.0).softmax(0), rtol=0, atol=0.015)
    torch.testing.assert_close(sure[0], logits[0, 0].softmax(0)[token[0]])
    assert propose(logits, None, 2.0)[0].unique().tolist() == [2]


def test_a_share_of_whole_chunks_is_given():
    generator = torch.Generator().manual_seed(0)
    chunks = cut(30, 3, 5, generator)
    assert all(3 <= stop - start <= 5 for start, stop in chunks)
    assert all(one[1] == two[0] for one, two in itertools.pairwise(chunks))
    config = InpaintingConfig(low=0.5, high=0.5, min_chunk=5, max_chunk=5, free=0, stretch=1.0)
    answer = hinted_answer(list(range(1, 21)), 24, 0, config, generator)
    assert len(answer) == 24
    assert sum(token > 0 for token in answer) == 10
    assert all(token in (0, place + 1) for place, token in enumerate(answer))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": ObjectiveConfig("bgpo"), "likelihood": LikelihoodConfig("one_step")}, "needs draws"),
        ({"objective": ObjectiveConfig("inpainting_guided"), "likelihood": LikelihoodConfig("elbo")}, "weights tokens"),
        *(
            ({"objective": objective, "likelihood": LikelihoodConfig("elbo", chunk=1)}, "likelihood.chunk")
            for objective in (
                ObjectiveConfig("gspo"),
                ObjectiveConfig("bgpo", kl={"kind": "k3", "coef": 1.0, "aggregation": "sequence_mean"}),
                ObjectiveConfig("bgpo", gate={"kind": "off_policy", "limit": 0.05}),
                ObjectiveConfig("bgpo", clip={"kind": "gmpo"}),
                ObjectiveConfig("bgpo", clip={"kind": "ppo_clip", "ratio_limit": 10.0}),
            )
        ),
        ({"objective": ObjectiveConfig("gigpo")}, "anchor|observation"),
        ({"inpainting": InpaintingConfig(replacements=4)}, "replacements is 4"),
        ({"inpainting": InpaintingConfig(replacements=1)}, "leaves no room"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        config_of("masked", tmp_path, **changes)


def test_sums_over_draws_may_be_cut():
    assert splits(make_objective(ObjectiveConfig("bgpo", kl={"kind": "k3", "coef": 1.0})))


def test_blocks_and_steps_divide_evenly():
    for sampling in (MaskedSampling(10, 4, 4), MaskedSampling(8, 4, 3)):
        with pytest.raises(ValueError, match="must"):
            sampling.validate()
    assert MaskedSampling(8, 4, 4).draws == 8 * 3


def test_the_temperature_of_evaluations_is_set_in_one_place(tmp_path):
    config = DOMAINS["masked"].make_config("masked_sft", tmp_path)
    config.evaluation.sampler.temperature = 0.7
    with pytest.raises(ValueError, match=r"evaluations sample at evaluation\.temperature"):
        config.validate()
