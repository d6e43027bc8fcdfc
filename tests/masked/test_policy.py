"""A masked-diffusion policy: attention in both directions, its likelihoods, and BGPO's bound on them."""

import dataclasses
import itertools
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from mmrl.core.objectives.objective import Objective
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.masked.masked_policy import MaskedPayload, MaskedPolicy, hide_counts
from mmrl.training.objectives import ObjectiveConfig, make_objective
from mmrl.vlm.data.dataset import DataConfig, load_tasks
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.model.model_config import ModelConfig
from mmrl.vlm.toy.countdown import build_model
from tests.contracts.domains import tiny_masked

LENGTH = 5


@pytest.fixture(scope="module")
def policy():
    return load_policy(ModelConfig(path=str(tiny_masked())), policy_class=MaskedPolicy)


@pytest.fixture(scope="module")
def tasks():
    return load_tasks(DataConfig(path=str(tiny_masked().with_name("problems.jsonl")))).tasks


def rows(policy, tasks, draws=0, groups=2, size=2):
    """Random answers to questions of unequal lengths, scored and with advantages."""
    generator = torch.Generator().manual_seed(0)
    count = groups * size
    tokens = torch.randint(20, 300, (count, LENGTH), generator=generator)
    hidden = hide_counts(torch.rand(count, draws, LENGTH + 1, generator=generator))
    payload = MaskedPayload(
        prompts=[policy.encode(task) for task in tasks[:groups]],
        tasks=tasks[:groups],
        response_ids=tokens,
        texts=[""] * count,
        finish=["eos"] * count,
        hidden=hidden,
        length=policy.lengths(tokens),
    )
    mask = torch.ones(count, draws or LENGTH)
    group = torch.arange(groups).repeat_interleave(size)
    found = Rollouts(group, mask, torch.zeros_like(mask), torch.arange(count).float(), payload)
    return found.replace(advantage=torch.tensor([1.0, -0.5, 0.7, -1.3])[:count, None].expand_as(mask))


def logp_of(policy, prompt, answer, token, place):
    return policy.logits([prompt], answer[None])[0, place].log_softmax(-1)[token]


def test_every_token_sees_those_on_both_sides_and_no_padding(policy, tasks):
    short, long = sorted((policy.encode(task) for task in tasks[:4]), key=len)[::3]
    assert len(short) < len(long)
    answer = torch.full((1, LENGTH), policy.mask_id)
    alone = policy.logits([short], answer)
    together = policy.logits([long, short], answer.expand(2, -1))
    torch.testing.assert_close(together[1], alone[0], rtol=1e-5, atol=1e-5)
    changed = answer.clone()
    changed[0, -1] = 50
    assert (policy.logits([short], changed)[0, 0] - alone[0, 0]).abs().nan_to_num().max() > 1e-4


def test_the_folder_is_an_ordinary_model(policy, tmp_path):
    policy.save_pretrained(tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    prompt = torch.tensor([[50, 60, policy.mask_id]])
    whole = torch.zeros(1, 1, 3, 3)
    expected = plain(input_ids=prompt, attention_mask=whole).logits
    found = policy.network(input_ids=prompt, attention_mask=whole).logits
    torch.testing.assert_close(found, expected)
    causal = plain(input_ids=prompt).logits
    assert (causal[0, 0] - expected[0, 0]).abs().max() > 1e-4


def test_a_model_without_a_mask_token_is_refused(tmp_path):
    folder = build_model(tmp_path / "model", hidden=24, layers=1)
    with pytest.raises(UserError, match="has no mask token"):
        load_policy(ModelConfig(path=str(folder)), policy_class=MaskedPolicy)


def test_one_step_scores_each_token_with_the_whole_answer_masked(policy, tasks):
    rollouts = rows(policy, tasks)
    found = policy(rollouts, outputs=frozenset({"logp", "entropy"}))
    payload = MaskedPayload.of(rollouts)
    masked = torch.full((LENGTH,), policy.mask_id)
    for row, place in itertools.product(range(4), range(LENGTH)):
        token = payload.response_ids[row, place]
        expected = logp_of(policy, payload.prompts[row // 2], masked, token, place)
        torch.testing.assert_close(found.logp[row, place], expected, rtol=1e-4, atol=1e-4)
    distribution = policy.logits([payload.prompts[0]], masked[None])[0, 0].softmax(-1)
    assert float(found.entropy[0, 0].detach()) == pytest.approx(
        float(torch.special.entr(distribution.detach()).sum()), rel=1e-4
    )
    assert float(distribution[policy.mask_id].detach()) == 0


def test_a_draw_weighs_its_masked_tokens_by_the_share_that_is_masked(policy, tasks):
    rollouts = rows(policy, tasks, draws=3)
    found = policy(rollouts, level="draws").logp
    payload = MaskedPayload.of(rollouts)
    for row, draw in itertools.product(range(4), range(3)):
        hidden, tokens = payload.hidden[row, draw], payload.response_ids[row]
        answer = tokens.masked_fill(hidden, policy.mask_id)
        places = torch.nonzero(hidden).flatten().tolist()
        terms = [logp_of(policy, payload.prompts[row // 2], answer, tokens[place], place) for place in places]
        torch.testing.assert_close(found[row, draw], LENGTH / len(places) * sum(terms), rtol=1e-4, atol=1e-3)


def test_the_mean_over_all_masks_is_the_mean_over_all_orders(policy, tasks):
    """The bound is that of drawing tokens one by one in a random order, of which the draws are unbiased estimates."""
    rollouts, length = rows(policy, tasks, groups=1, size=1), 3
    prompt = MaskedPayload.of(rollouts).prompts[0]
    tokens = MaskedPayload.of(rollouts).response_ids[0, :length]

    def conditional(place, known):
        answer = torch.full((length,), policy.mask_id)
        answer[list(known)] = tokens[list(known)]
        return float(logp_of(policy, prompt, answer, tokens[place], place).detach())

    orders = [
        sum(conditional(order[at], order[:at]) for at in range(length))
        for order in itertools.permutations(range(length))
    ]
    bounds = [
        sum(
            length / count * sum(conditional(place, set(range(length)) - set(hidden)) for place in hidden)
            for hidden in itertools.combinations(range(length), count)
        )
        / math.comb(length, count)
        for count in range(1, length + 1)
    ]
    assert sum(bounds) / length == pytest.approx(sum(orders) / len(orders), rel=1e-5)


def test_masks_have_every_number_of_tokens_equally_often():
    hidden = hide_counts(torch.rand(6000, LENGTH + 1, generator=torch.Generator().manual_seed(0)))
    counts = torch.bincount(hidden.sum(1), minlength=LENGTH + 1)
    assert counts[0] == 0
    assert ((counts[1:] / 6000 - 1 / LENGTH).abs() < 0.03).all()
    assert ((hidden.float().mean(0) - (LENGTH + 1) / 2 / LENGTH).abs() < 0.03).all()


def objectives():
    bound = make_objective(ObjectiveConfig(preset="bgpo"))
    return bound, bound.override({"ratio": {"kind": "sequence_full"}, "clip": {"kind": "unclipped"}})


def gradient_of(objective: Objective, policy, rollouts, parts=None):
    policy.zero_grad()
    counts = objective.denominators(rollouts)
    total = 0.0
    for part in parts or [rollouts]:
        loss = objective.loss(policy(part, level="draws"), part, counts).loss
        loss.backward()
        total += float(loss.detach())
    return total, torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def test_bgpo_has_value_and_gradient_of_the_elbo_objective_on_policy_and_bounds_it_elsewhere(policy, tasks):
    rollouts, (bound, elbo) = rows(policy, tasks, draws=4), objectives()
    logp = policy(rollouts, level="draws").logp.detach()
    here = rollouts.replace(logp_old=logp)
    value, slope = gradient_of(bound, policy, here)
    value_elbo, slope_elbo = gradient_of(elbo, policy, here)
    assert value == pytest.approx(value_elbo, rel=1e-5)
    torch.testing.assert_close(slope, slope_elbo, rtol=1e-4, atol=1e-5)
    away = rollouts.replace(logp_old=logp + 0.5 * torch.randn(logp.shape, generator=torch.Generator().manual_seed(1)))
    with torch.no_grad():
        outputs, counts = policy(away, level="draws"), bound.denominators(away)
        above, below = (float(each.loss(outputs, away, counts).loss) for each in (bound, elbo))
    assert above > below + 1e-3


def test_draws_can_be_backpropagated_one_at_a_time(policy, tasks):
    rollouts, (bound, _) = rows(policy, tasks, draws=4), objectives()
    rollouts = rollouts.replace(logp_old=policy(rollouts, level="draws").logp.detach() + 0.1)
    eye = torch.eye(4)
    parts = [rollouts.replace(mask=rollouts.mask * eye[draw]) for draw in range(4)]
    value, slope = gradient_of(bound, policy, rollouts)
    value_parts, slope_parts = gradient_of(bound, policy, rollouts, parts)
    assert value_parts == pytest.approx(value, rel=1e-5)
    torch.testing.assert_close(slope_parts, slope, rtol=1e-4, atol=1e-6)


def test_answers_are_padded_and_end_at_the_first_end_token(policy, tasks):
    ids = policy.padded(policy.encode_answer(policy.encode(tasks[0]), "1+2"), 6)
    assert len(ids) == 6
    assert policy.lengths(torch.tensor([ids, [50] * 6])).tolist() == [4, 6]


def test_a_layer_of_another_family_is_all_to_all_too(tmp_path, tasks):
    from mmrl.vlm.toy.signs import build_model

    folder = build_model(tmp_path / "llama", mask=True, family="llama", hidden=24, layers=1)
    policy = load_policy(ModelConfig(path=str(folder), attention="eager"), policy_class=MaskedPolicy)
    prompt, answer = policy.encode(tasks[0]), torch.full((1, LENGTH), policy.mask_id)
    changed = answer.clone()
    changed[0, -1] = 50
    moved = policy.logits([prompt], changed)[0, 0] - policy.logits([prompt], answer)[0, 0]
    assert moved.abs().nan_to_num().max() > 1e-4


def test_payload_fields_survive_selection_and_joining(policy, tasks):
    rollouts = rows(policy, tasks, draws=2)
    parts = [rollouts.select_groups(torch.tensor([group])) for group in (0, 1)]
    joined = MaskedPayload.of(Rollouts.concat(parts))
    for item in dataclasses.fields(MaskedPayload):
        first, second = getattr(joined, item.name), getattr(MaskedPayload.of(rollouts), item.name)
        assert torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second
