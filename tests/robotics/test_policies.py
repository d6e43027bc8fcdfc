import copy
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from mmrl.errors import UserError
from mmrl.fields import check_config
from mmrl.training.processes import avoid_refused_instructions
from robotics.policies.base.encoder import EncoderConfig
from robotics.policies.base.policy import ActionPolicy, PolicyInputs, open_policy
from robotics.policies.base.statistics import ActionStatistics, StateStatistics
from robotics.policies.flow import FlowActionPolicy, FlowPolicyConfig
from robotics.policies.gaussian import GaussianActionPolicy, GaussianPolicyConfig
from robotics.policies.module import ModuleAdapter
from robotics.policies.small import SmallVlaConfig, SmallVlaPolicy
from robotics.policies.vlm import VlmActionConfig, VlmActionPolicy

B, K, D, S = 3, 4, 2, 5
TEXTS = ("touch the red cube", "put the blue cube gently on the green plate", "touch the green cube")
ENCODER = {"image_size": (32, 32), "state_size": S, "width": 32, "heads": 2, "layers": 2, "channels": 16}
PLACES = {"octaves": 2, "condition_queries": True}
KINDS = (
    *("small_step", "small_token", "gaussian_action", "gaussian_state"),
    *("flow", "flow_x0", "vlm_zero", "vlm_learned", "adapter"),
)
SAVED = tuple(kind for kind in KINDS if kind != "adapter")


class Gaussian(nn.Module):
    """What a user may bring: a diagonal Gaussian over a chunk, one log-probability a control step."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.mean = nn.Linear(S, K * D)
        self.log_std = nn.Parameter(torch.full((D,), -1.0))

    def distribution(self, obs, temperature):
        mean = self.mean(obs["state"]).unflatten(1, (K, D)).float()
        return torch.distributions.Normal(mean, temperature * self.log_std.exp())

    def act(self, obs, generator, temperature=1.0, greedy=False):
        found = self.distribution(obs, temperature)
        noise = 0.0 if greedy else torch.randn(found.mean.shape, generator=generator)
        actions = found.mean + found.stddev * noise
        return actions, found.log_prob(actions).sum(-1)

    def log_probs(self, obs, actions, temperature=1.0):
        found = self.distribution(obs, temperature)
        return found.log_prob(actions).sum(-1), found.entropy().sum(-1)


def make_inputs(size=32, rows=B, seed=0) -> PolicyInputs:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (rows, size, size, 3), generator=generator, dtype=torch.uint8)
    return PolicyInputs(images, torch.randn(rows, S, generator=generator), TEXTS[:rows])


def make_small(queries="step", seed=0, **changes) -> SmallVlaPolicy:
    config = SmallVlaConfig(D, K, bins=16, queries=queries, encoder=EncoderConfig(**ENCODER), **changes)
    return SmallVlaPolicy.build(config, TEXTS, seed)


def make_gaussian(std_per="action", seed=0, **changes) -> GaussianActionPolicy:
    config = GaussianPolicyConfig(D, K, std_per=std_per, **changes, encoder=EncoderConfig(**ENCODER))
    return GaussianActionPolicy.build(config, TEXTS, seed)


def make_flow(seed=0, **changes) -> FlowActionPolicy:
    sizes = ENCODER | changes.pop("encoder", {})
    config = FlowPolicyConfig(D, K, **{"steps": 3, "hidden": 64} | changes, encoder=EncoderConfig(**sizes))
    return FlowActionPolicy.build(config, TEXTS, seed)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    pytest.importorskip("transformers", reason="needs pip install 'mmrl-suite[vlm]'")
    from mmrl.vlm.toy.tiny import build_tiny_vlm

    folder = tmp_path_factory.mktemp("vla") / "tiny"
    return build_tiny_vlm(folder, corpus=TEXTS, initializer_range=0.15, max_positions=256)


@pytest.fixture(scope="session")
def make(tiny_folder):
    """Builds a policy of a kind; vlm policies are those of one folder."""
    from mmrl.vlm.model.config import LoraSettings, ModelConfig

    def build(kind, seed=0, lora=False, **changes) -> ActionPolicy:
        if kind.startswith("small"):
            return make_small(kind.removeprefix("small_"), seed, **changes)
        if kind.startswith("gaussian"):
            return make_gaussian(kind.removeprefix("gaussian_"), seed, **changes)
        if kind == "flow":
            return make_flow(seed, **changes)
        if kind == "flow_x0":
            return make_flow(seed, parameterisation="x0", encoder=PLACES, **changes)
        if kind == "adapter":
            return ModuleAdapter(Gaussian(), D, K, decisions=K)
        model = ModelConfig(path=str(tiny_folder), lora=LoraSettings(enabled=lora, rank=2))
        state = S if kind == "vlm_learned" else None
        options = {"bins": 32, "placeholders": kind.removeprefix("vlm_"), "state_size": state, "seed": seed} | changes
        return VlmActionPolicy.from_model(model, VlmActionConfig(D, K, **options))

    return build


@pytest.fixture(scope="session")
def policies(make):
    """One of each kind; tests that change weights make their own."""
    return {kind: make(kind) for kind in KINDS}


@pytest.fixture(params=KINDS)
def policy(request, policies) -> ActionPolicy:
    return policies[request.param]


def draw(policy, batch=None, seed=0, **options):
    return policy.act(make_inputs() if batch is None else batch, torch.Generator().manual_seed(seed), **options)


def demonstrations(seed=0):
    actions = torch.rand(B, K, D, generator=torch.Generator().manual_seed(seed)) * 1.6 - 0.8
    return actions, torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]])


# ---- what every policy keeps ----


def test_a_choice_has_the_promised_shapes(policy):
    choice = draw(policy)
    assert (policy.chunk, policy.action_size) == (K, D)
    assert tuple(choice.actions.shape) == (B, K, D)
    assert choice.actions.dtype == choice.logp.dtype == torch.float32
    assert float(choice.actions.abs().max()) <= 1
    assert tuple(choice.logp.shape) == (B, policy.decisions)
    assert len(choice.decisions) == B
    assert not choice.logp.requires_grad
    assert not choice.decisions.requires_grad


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_an_update_starts_at_ratio_one(policy, temperature, autocast):
    if autocast:
        avoid_refused_instructions()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        choice = draw(policy, temperature=temperature)
        logp, entropy = policy("log_probs", make_inputs(), choice.decisions, temperature)
    assert logp.dtype == entropy.dtype == torch.float32
    assert entropy.shape == logp.shape
    torch.testing.assert_close(logp.detach(), choice.logp, rtol=0, atol=1e-6)


def test_the_temperature_is_part_of_the_log_probability(policy):
    choice = draw(policy, temperature=1.6)
    other = policy.log_probs(make_inputs(), choice.decisions, 1.0)[0]
    assert float((other.detach() - choice.logp).abs().max()) > 1e-3


def test_one_seed_gives_one_choice(policy):
    first, again, other = draw(policy, seed=1), draw(policy, seed=1), draw(policy, seed=2)
    assert torch.equal(first.decisions, again.decisions)
    assert torch.equal(first.logp, again.logp)
    assert not torch.equal(first.actions, other.actions)


def test_draws_leave_the_global_generator_alone(policy):
    before = torch.random.get_rng_state()
    draw(policy)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_greedy_does_not_depend_on_the_temperature(policy):
    cold, hot = draw(policy, greedy=True), draw(policy, greedy=True, temperature=3.0)
    torch.testing.assert_close(cold.actions, hot.actions)


def test_rows_do_not_depend_on_each_other(policy):
    batch, choice = make_inputs(), draw(policy)
    together = policy.log_probs(batch, choice.decisions)[0]
    for row in range(B):
        alone = policy.log_probs(batch.select([row]), choice.decisions[row : row + 1])[0]
        torch.testing.assert_close(alone[0], together[row], rtol=1e-4, atol=2e-5)


def test_the_gradient_reaches_every_weight(make, policy, request):
    policy = make(request.node.callspec.params["policy"])
    choice = draw(policy)
    policy.log_probs(make_inputs(), choice.decisions)[0].square().sum().backward()
    trained = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
    assert trained
    # the softmax takes no notice of what all keys have in common, nor of a shift of a whole map
    silent = ("k_proj.bias", "stem.keypoints.bias")
    for name, weight in trained.items():
        assert weight.grad is not None, name
        assert name.endswith(silent) or float(weight.grad.abs().max()) > 0, name


def test_gradients_agree_with_finite_differences(make, policy, request):
    policy = make(request.node.callspec.params["policy"])
    batch, choice = make_inputs(), draw(policy, temperature=1.6)
    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    generator = torch.Generator().manual_seed(3)
    side = torch.randn(choice.logp.shape, generator=generator)

    def value():
        return (policy.log_probs(batch, choice.decisions, 1.6)[0] * side).sum()

    value().backward()
    # along the gradient itself the slope is largest, and rounding matters least
    slope = math.sqrt(sum(float(weight.grad.square().sum()) for weight in weights))
    step = 2e-3
    ends = []
    with torch.no_grad():
        for sign in (1, -2):
            for weight in weights:
                weight += sign * step / slope * weight.grad
            ends.append(float(value()))
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=0.02)


def test_cloning_ignores_what_the_mask_leaves_out(policy):
    actions, mask = demonstrations()
    changed = torch.where(mask[..., None].bool(), actions, -actions)
    losses = []
    for wanted in (actions, changed):
        loss, metrics = policy("bc_loss", make_inputs(), wanted, mask, torch.Generator().manual_seed(0))
        losses.append(float(loss.detach()))
        assert metrics["bc/loss"] == pytest.approx(losses[-1])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    other = policy.bc_loss(make_inputs(), -actions, mask, torch.Generator().manual_seed(0))[0]
    assert float(other.detach()) != pytest.approx(losses[0], rel=1e-5)


def test_cloning_brings_actions_to_the_demonstrations(make, policy, request):
    kind = request.node.callspec.params["policy"]
    policy, generator = make(kind), torch.Generator().manual_seed(0)
    actions, mask = demonstrations()
    steps, rate, repeats = {"flow": (60, 6e-3, 8), "adapter": (200, 1e-2, 1)}.get(kind, (25, 3e-3, 1))
    optimizer = torch.optim.Adam(policy.parameters(), rate)
    before = distance(policy, actions, mask)
    # more draws of time and noise a step
    batch = PolicyInputs.concat([make_inputs()] * repeats)
    wanted, counted = actions.repeat(repeats, 1, 1), mask.repeat(repeats, 1)
    for _ in range(steps):
        loss, _ = policy.bc_loss(batch, wanted, counted, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert distance(policy, actions, mask) < 0.4 * before


def distance(policy, actions, mask):
    found = draw(policy, greedy=True).actions
    return float(((found - actions).abs() * mask[..., None]).sum() / mask.sum())


@pytest.mark.parametrize("kind", SAVED)
def test_a_saved_policy_comes_back_bit_for_bit(make, kind, tmp_path):
    policy = make(kind, seed=1)
    policy.statistics = ActionStatistics.from_arrays(np.random.default_rng(0).normal(size=(20, D)))
    policy.scale_states(StateStatistics(np.full(S, 0.5), np.full(S, 2.0)))
    policy.save_pretrained(tmp_path / "saved")
    opened, loaded = open_policy(tmp_path / "saved"), make(kind, seed=2)
    loaded.load_weights(tmp_path / "saved")
    expected = draw(policy)
    for other in (opened, loaded):
        choice = draw(other)
        assert torch.equal(choice.actions, expected.actions)
        assert torch.equal(choice.logp, expected.logp)
    assert opened.statistics.as_dict() == loaded.statistics.as_dict() == policy.statistics.as_dict()
    assert opened.config == policy.config
    policy.statistics = None
    policy.save_pretrained(tmp_path / "saved")
    loaded.load_weights(tmp_path / "saved")
    assert open_policy(tmp_path / "saved").statistics is loaded.statistics is None


def test_a_copy_is_a_policy_of_its_own(make, policy, request):
    policy = make(request.node.callspec.params["policy"])
    copied, expected = copy.deepcopy(policy), draw(policy)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(0.5)
    # a Gaussian's density at its own draw does not depend on its mean, so actions are looked at as well
    assert outcome(draw(copied)) == outcome(expected)
    assert outcome(draw(policy)) != outcome(expected)


def outcome(choice):
    return choice.actions.tolist(), choice.logp.tolist()


def test_other_calls_than_the_methods_are_refused(policy):
    with pytest.raises(ValueError, match="available: act, log_probs, bc_loss"):
        policy("save_pretrained", "somewhere")
    with pytest.raises(ValueError, match="must be"):
        policy.bc_loss(make_inputs(), torch.zeros(B, K, D + 1), torch.ones(B, K))


# ---- decisions that count ----


def test_tokens_after_the_last_control_step_do_not_count(policies):
    found = policies["small_step"].executed_mask(torch.tensor([[0, 1], [3, 4]]))
    expected = [[[0] * 8, [1] * 2 + [0] * 6], [[1] * 6 + [0] * 2, [1] * 8]]
    assert found.tolist() == expected
    assert policies["adapter"].executed_mask(torch.tensor([2])).tolist() == [[1, 1, 0, 0]]


def test_denoising_steps_count_together():
    # as many as control steps, yet none of them belongs to one
    assert make_flow(steps=K).executed_mask(torch.tensor([0, 1, 4])).tolist() == [[0] * 4, [1] * 4, [1] * 4]


# ---- inputs ----


def test_inputs_are_selected_and_joined():
    batch = make_inputs()
    parts = PolicyInputs.concat([batch.select(torch.tensor([2])), batch.select([0, 1])])
    assert parts.instructions == (TEXTS[2], TEXTS[0], TEXTS[1])
    assert torch.equal(parts.state, batch.state[[2, 0, 1]])
    assert torch.equal(batch.select(torch.tensor([True, False, True])).images, batch.images[[0, 2]])
    blind = PolicyInputs(None, batch.state, TEXTS)
    assert PolicyInputs.concat([blind, blind]).images is None
    assert len(blind.to("cpu").select([1])) == 1


@pytest.mark.parametrize(
    ("images", "state"),
    [
        (torch.zeros(3, 3, 8, 8, dtype=torch.uint8), None),
        (torch.zeros(3, 8, 8, 3), None),
        (torch.zeros(2, 8, 8, 3, dtype=torch.uint8), None),
        (None, torch.zeros(3)),
        (None, torch.zeros(2, 4)),
    ],
)
def test_inputs_of_other_shapes_are_refused(images, state):
    with pytest.raises(ValueError):
        PolicyInputs(images, state, TEXTS)


# ---- the small policy ----


def test_small_log_probs_are_the_softmax_of_the_logits(policies):
    policy, batch = policies["small_step"], make_inputs()
    choice = draw(policy, temperature=1.6)
    logits = policy.logits(batch).detach().double().numpy() / 1.6
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    tokens = choice.decisions.numpy()
    np.testing.assert_allclose(choice.logp, np.take_along_axis(logp, tokens[..., None], -1)[..., 0], atol=1e-5)
    entropy = policy.log_probs(batch, choice.decisions, 1.6)[1].detach()
    np.testing.assert_allclose(entropy, -(np.exp(logp) * logp).sum(-1), atol=1e-5)
    np.testing.assert_allclose(choice.actions.flatten(1), (2 * tokens + 1) / 16 - 1, atol=1e-6)


@pytest.mark.parametrize("mode", ["uniform", "openvla"])
def test_a_spread_target_has_its_mean_at_the_demonstration(mode):
    policy = make_small(label_spread=0.2, token_mode=mode)
    actions = torch.tensor([[0.05, 0.11, -0.3]])
    target = policy._blurred(actions)
    torch.testing.assert_close(target.sum(-1), torch.ones(1, 3))
    centres = torch.from_numpy(policy.tokenizer.centres).float()
    torch.testing.assert_close((target * centres).sum(-1), actions, atol=0.02, rtol=0)
    assert torch.equal(
        policy.tokenizer.decode(target.argmax(-1)), policy.tokenizer.decode(policy.tokenizer.encode(actions))
    )


def test_everything_that_it_sees_matters(policies):
    policy, batch = policies["small_step"], make_inputs()
    expected = policy.logits(batch).detach()
    changes = {
        "images": 255 - batch.images,
        "state": batch.state + 1,
        "instructions": tuple(reversed(TEXTS)),
    }
    for name, value in changes.items():
        changed = PolicyInputs(**{"images": batch.images, "state": batch.state, "instructions": TEXTS} | {name: value})
        assert float((policy.logits(changed).detach() - expected).abs().max()) > 1e-3, name


def test_the_order_of_words_matters(policies):
    policy, batch = policies["small_step"], make_inputs()
    swapped = PolicyInputs(batch.images, batch.state, ("red on the blue cube",) * B)
    other = PolicyInputs(batch.images, batch.state, ("blue on the red cube",) * B)
    assert float((policy.logits(swapped) - policy.logits(other)).detach().abs().max()) > 1e-4


def test_keypoints_lie_where_the_map_is_high():
    from robotics.policies.base.encoder import expected_places

    maps = torch.zeros(1, 2, 5, 9)
    maps[0, 0, 4, 0] = maps[0, 1, 2, 8] = 100.0
    # rows first, then columns: bottom left, and the middle of the right edge
    torch.testing.assert_close(expected_places(maps), torch.tensor([[1.0, 0.0, -1.0, 1.0]]))


def test_unknown_words_are_counted_and_known_ones_are_not():
    policy = make_small()
    batch = make_inputs()
    odd = PolicyInputs(batch.images, batch.state, ("touch the Purple, cube!", TEXTS[0], TEXTS[0]))
    policy.logits(odd)
    assert dict(policy.vocabulary.unknown) == {"purple": 1}


def test_a_task_without_words_is_an_instruction_too():
    policy, batch = SmallVlaPolicy.build(SmallVlaConfig(D, K, encoder=EncoderConfig(**ENCODER)), [""]), make_inputs()
    logits = policy.logits(PolicyInputs(batch.images, batch.state, ("", *TEXTS[1:])))
    assert torch.isfinite(logits).all()
    assert policy.vocabulary.unknown.total() == sum(len(text.split()) for text in TEXTS[1:])


def test_states_are_scaled_by_the_data_sets_statistics():
    policy, batch = make_small(), make_inputs()
    mean, std = np.arange(S, dtype=float), np.array([1.0, 2.0, 3.0, 4.0, 0.0])
    before = policy.logits(batch).detach()
    policy.scale_states(StateStatistics(mean, std))
    raw = batch.state * torch.tensor([1.0, 2.0, 3.0, 4.0, 1.0]) + torch.from_numpy(mean).float()
    torch.testing.assert_close(policy.logits(PolicyInputs(batch.images, raw, TEXTS)), before, atol=1e-4, rtol=1e-4)
    with pytest.raises(UserError, match=f"2 state entries, the policy has {S}"):
        policy.scale_states(StateStatistics(np.zeros(2), np.ones(2)))


def test_a_policy_may_see_only_a_state_or_only_pictures():
    for changes, batch in (
        ({"image_size": None}, PolicyInputs(None, torch.zeros(1, S), TEXTS[:1])),
        ({"state_size": None}, PolicyInputs(make_inputs().images[:1], None, TEXTS[:1])),
        ({"keypoints": 0}, make_inputs(rows=1)),
        ({"keypoints": 0} | PLACES, make_inputs(rows=1)),
        ({"image_size": None} | PLACES, PolicyInputs(None, torch.zeros(1, S), TEXTS[:1])),
    ):
        config = SmallVlaConfig(D, K, encoder=EncoderConfig(**ENCODER | changes))
        assert SmallVlaPolicy.build(config, TEXTS).logits(batch).shape == (1, K * D, 64)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (make_inputs(64), r"images of \(32, 32\) pixels, got \(64, 64\)"),
        (PolicyInputs(None, torch.zeros(1, S), TEXTS[:1]), "got none"),
        (PolicyInputs(make_inputs().images, torch.zeros(B, 2), TEXTS), f"state of {S} entries, got 2"),
        (PolicyInputs(make_inputs().images[:1], torch.zeros(1, S), ("word " * 33,)), "33 words; at most 32"),
    ],
)
def test_observations_that_do_not_fit_are_named(batch, message):
    with pytest.raises(UserError, match=message):
        make_small().logits(batch)


@pytest.mark.parametrize(
    "changes",
    [{"queries": "both"}, {"label_smoothing": 1.0}, {"chunk": 0}, {"token_mode": "log"}],
)
def test_settings_out_of_range_are_refused(changes):
    with pytest.raises(UserError):
        SmallVlaPolicy.build(SmallVlaConfig(**{"action_size": D} | changes), TEXTS)


@pytest.mark.parametrize("changes", [{"image_size": (30, 32)}, {"width": 30}, {"image_size": None, "state_size": None}])
def test_encoder_sizes_out_of_range_are_refused(changes):
    with pytest.raises(UserError):
        check_config(EncoderConfig(**ENCODER | changes))


def test_folders_that_are_no_policy_are_named(tmp_path):
    with pytest.raises(UserError, match=r"no policy\.json"):
        open_policy(tmp_path)
    make_small().save_pretrained(tmp_path)
    other = SmallVlaPolicy.build(SmallVlaConfig(D, K, bins=16, encoder=EncoderConfig(**ENCODER)), ["other words"])
    with pytest.raises(UserError, match="other words"):
        other.load_weights(tmp_path)
    with pytest.raises(UserError, match="do not fit"):
        make_small("token").load_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(UserError, match="damaged"):
        open_policy(tmp_path)
    (tmp_path / "policy.json").write_text('{"kind": "large"}')
    with pytest.raises(UserError, match="known are: small, gaussian, flow, vlm"):
        open_policy(tmp_path)


# ---- the flow policy ----


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_flow_steps_are_the_gaussians_of_flow_grpo(reduction):
    policy, batch, level, temperature = make_flow(logp_reduction=reduction), make_inputs(), 0.5, 1.3
    choice = draw(policy, temperature=temperature)
    chain = choice.decisions.double()
    assert tuple(chain.shape) == (B, 4, K * D)
    with torch.no_grad():
        seen = policy.encoder(batch).flatten(1)
        for number, (now, later) in enumerate([(1, 2 / 3), (2 / 3, 1 / 3), (1 / 3, 0)]):
            velocity = policy.velocity(seen, choice.decisions[:, number], torch.full((B,), now)).double()
            spread = level * math.sqrt(now / (1 - min(now, 2 / 3)))
            dt = later - now
            x = chain[:, number]
            mean = x + velocity * dt + spread**2 / (2 * now) * (x + (1 - now) * velocity) * dt
            step = torch.distributions.Normal(mean, spread * math.sqrt(-dt) * temperature)
            density, entropy = step.log_prob(chain[:, number + 1]), step.entropy()
            expected = [getattr(value, reduction)(1) for value in (density, entropy)]
            torch.testing.assert_close(choice.logp[:, number].double(), expected[0], atol=1e-4, rtol=1e-4)
            found = policy.log_probs(batch, choice.decisions, temperature)[1][:, number]
            torch.testing.assert_close(found.double(), expected[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(choice.actions.flatten(1), choice.decisions[:, -1].clamp(-1, 1))


def test_greedy_follows_the_flow_without_noise_or_density():
    policy, batch = make_flow(steps=4), make_inputs()
    choice = draw(policy, greedy=True)
    assert bool(choice.logp.isnan().all())
    with torch.no_grad():
        x, seen = choice.decisions[:, 0], policy.encoder(batch).flatten(1)
        for number in range(4):
            x = x - 0.25 * policy.velocity(seen, x, torch.full((B,), 1 - number / 4))
    torch.testing.assert_close(choice.actions.flatten(1), x.clamp(-1, 1), atol=1e-5, rtol=1e-5)


def test_flow_matching_is_the_error_of_the_velocity():
    policy, batch = make_flow(), make_inputs()
    actions, mask = demonstrations()
    loss, _ = policy.bc_loss(batch, actions, mask, torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(5)
    noise, time = torch.randn(B, K * D, generator=generator), torch.rand(B, generator=generator)
    clean = (actions * mask[..., None]).flatten(1)
    noisy = (1 - time[:, None]) * clean + time[:, None] * noise
    error = (policy.velocity(policy.encoder(batch).flatten(1), noisy, time) - (noise - clean)).square()
    torch.testing.assert_close(loss, error[mask.repeat_interleave(D, 1).bool()].mean())
    with pytest.raises(ValueError, match="pass bc_loss a generator"):
        policy.bc_loss(batch, actions, mask)


def test_prediction_of_the_actions_is_their_error_and_leads_to_them():
    policy, batch = make_flow(parameterisation="x0"), make_inputs()
    actions, mask = demonstrations()
    loss, _ = policy.bc_loss(batch, actions, mask, torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(5)
    noise, time = torch.randn(B, K * D, generator=generator), torch.rand(B, generator=generator)
    clean = (actions * mask[..., None]).flatten(1)
    noisy = (1 - time[:, None]) * clean + time[:, None] * noise
    error = (policy.velocity(policy.encoder(batch).flatten(1), noisy, time) - clean).square()
    torch.testing.assert_close(loss, error[mask.repeat_interleave(D, 1).bool()].mean())
    with torch.no_grad():
        # whatever the noise, a network that always predicts 0.3 ends there
        policy.velocity.leave.weight.zero_()
        policy.velocity.leave.bias.fill_(0.3)
    torch.testing.assert_close(draw(policy, greedy=True).actions, torch.full((B, K, D), 0.3), atol=1e-5, rtol=0)


def test_old_folders_have_neither_octaves_nor_parameterisation(tmp_path):
    policy = make_flow()
    policy.save_pretrained(tmp_path)
    entries = json.loads((tmp_path / "policy.json").read_text())
    for name in PLACES:
        del entries["encoder"][name]
    del entries["parameterisation"]
    (tmp_path / "policy.json").write_text(json.dumps(entries))
    assert torch.equal(draw(open_policy(tmp_path)).actions, draw(policy).actions)


@pytest.mark.parametrize(
    "changes", [{"steps": 1}, {"noise_level": 0.0}, {"logp_reduction": "max"}, {"hidden": 0}, {"parameterisation": "v"}]
)
def test_flow_settings_out_of_range_are_refused(changes):
    with pytest.raises(UserError):
        make_flow(**changes)


# ---- the vision-language model ----


def test_action_logits_are_rows_of_the_whole_head(policies):
    policy, batch = policies["vlm_zero"], make_inputs(rows=1)
    texts = policy.vlm.processor.tokenizer.vocab_size
    assert policy.action_ids.tolist() == list(range(texts - 32, texts))
    prompt = policy._prompts(batch)[0]
    assert "What action should the robot take to touch the red cube?" in prompt.text
    network = policy.vlm.network
    language, tokens = network.model.language_model, K * D
    with torch.no_grad():
        embeddings = network.get_input_embeddings()(prompt.input_ids[None])
        seen = network.model.get_image_features(prompt.pixel_values, prompt.image_grid_thw, return_dict=True)
        embeddings[0, prompt.mm_token_type_ids > 0] = torch.cat(seen.pooler_output)
        embeddings = torch.cat([embeddings, torch.zeros(1, tokens, embeddings.shape[-1])], 1)
        following = prompt.next_position + torch.arange(tokens).expand(3, 1, -1)
        positions = torch.cat([prompt.position_ids[:, None], following], 2)
        hidden = language(inputs_embeds=embeddings, position_ids=positions, use_cache=False).last_hidden_state
        whole = network.lm_head(hidden[:, -tokens:])
        torch.testing.assert_close(policy.logits(batch), whole[..., texts - 32 : texts], atol=1e-4, rtol=1e-4)


def test_the_model_sees_picture_state_and_instruction(policies):
    policy, batch = policies["vlm_learned"], make_inputs()
    expected = policy.logits(batch).detach()
    for changes in ((255 - batch.images, batch.state, TEXTS), (batch.images, -batch.state, TEXTS)):
        assert float((policy.logits(PolicyInputs(*changes)).detach() - expected).abs().max()) > 1e-3
    told = policy.logits(PolicyInputs(batch.images, batch.state, (TEXTS[1], *TEXTS[1:]))).detach()
    assert float((told[0] - expected[0]).abs().max()) > 1e-3
    torch.testing.assert_close(told[1:], expected[1:], atol=1e-4, rtol=1e-4)


def test_a_model_may_go_without_pictures_but_not_without_its_state(policies):
    blind = PolicyInputs(None, torch.zeros(1, S), TEXTS[:1])
    assert bool(policies["vlm_learned"].logits(blind).isfinite().all())
    with pytest.raises(UserError, match=f"state of {S} entries, got none"):
        policies["vlm_learned"].logits(PolicyInputs(None, None, TEXTS[:1]))


def test_lora_trains_adapters_and_what_was_added(make, tmp_path):
    from mmrl.vlm.model.config import ModelConfig

    policy = make("vlm_learned", lora=True)
    names = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    assert {"extra.learned", "extra.project.weight", "extra.project.bias"} < names
    assert all("lora_" in name for name in names if not name.startswith("extra."))
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if name in names:
                weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)))
    policy.save_pretrained(tmp_path)
    opened = open_policy(tmp_path)
    assert torch.equal(draw(opened).logp, draw(policy).logp)
    assert {name for name, weight in opened.named_parameters() if weight.requires_grad} == names
    merged = VlmActionPolicy.from_pretrained(tmp_path, ModelConfig())
    assert not any("lora_" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(draw(merged).logp, draw(policy).logp, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "changes", [{"bins": 100000}, {"first_id": 399}, {"placeholders": "one"}, {"prompt": "Act."}, {"state_size": 0}]
)
def test_vlm_settings_out_of_range_are_refused(policies, changes):
    config = VlmActionConfig(**{"action_size": D, "chunk": K, "bins": 32} | changes)
    with pytest.raises(UserError):
        VlmActionPolicy(policies["vlm_zero"].vlm, config)


# ---- a user's own module ----


class Plain(nn.Module):
    """The least that will do: one step at a time, one log-probability, no options."""

    def act(self, obs, generator):
        actions = torch.randn(len(obs["instructions"]), D, generator=generator) * 3
        return actions, self.log_probs(obs, actions)

    def log_probs(self, obs, actions):
        return torch.distributions.Normal(0.0, 3.0).log_prob(actions).sum(-1)


def test_the_least_module_will_do():
    policy = ModuleAdapter(Plain(), D)
    choice = draw(policy)
    assert tuple(choice.actions.shape) == (B, 1, D)
    assert float(choice.actions.abs().max()) == 1
    # the actions that were carried out are clipped, those that are scored are not
    logp, entropy = policy.log_probs(make_inputs(), choice.decisions)
    assert entropy is None
    torch.testing.assert_close(logp, choice.logp)
    with pytest.raises(UserError, match=r"greedy is True, but Plain.act takes no argument 'greedy'"):
        draw(policy, greedy=True)
    with pytest.raises(UserError, match=r"temperature is 2.0, but Plain.log_probs takes no argument"):
        policy.log_probs(make_inputs(), choice.decisions, 2.0)


def test_a_module_is_given_what_there_is():
    seen = {}

    class Curious(Plain):
        def act(self, obs, generator):
            seen.update(obs)
            return super().act(obs, generator)

    draw(ModuleAdapter(Curious(), D), PolicyInputs(None, torch.zeros(B, S), TEXTS))
    assert set(seen) == {"state", "instructions"}
    assert seen["instructions"] == list(TEXTS)


def test_cloning_one_log_probability_a_chunk_needs_whole_chunks():
    class Whole(Gaussian):
        def log_probs(self, obs, actions, temperature=1.0):
            return super().log_probs(obs, actions, temperature)[0].sum(1)

    policy = ModuleAdapter(Whole(), D, K)
    actions, mask = demonstrations()
    loss, _ = policy.bc_loss(make_inputs(), actions, mask)
    each = -policy.log_probs(make_inputs(), actions)[0][:, 0]
    torch.testing.assert_close(loss, each[[0, 2]].mean())


def test_a_modules_own_cloning_loss_is_used():
    class Cloned(Gaussian):
        def bc_loss(self, obs, actions, mask):
            return (self.mean(obs["state"]).unflatten(1, (K, D)) - actions).square().mean()

    actions, mask = demonstrations()
    module = Cloned()
    loss, metrics = ModuleAdapter(module, D, K).bc_loss(make_inputs(), actions, mask)
    expected = (module.mean(make_inputs().state).unflatten(1, (K, D)) - actions).square().mean()
    torch.testing.assert_close(loss, expected)
    assert metrics == {"bc/loss": pytest.approx(float(expected.detach()))}


def test_a_modules_weights_are_saved(tmp_path):
    policy, other = ModuleAdapter(Gaussian(), D, K, K), ModuleAdapter(Gaussian(), D, K, K)
    with torch.no_grad():
        policy.module.mean.weight.add_(1.0)
    policy.save_pretrained(tmp_path)
    other.load_weights(tmp_path)
    assert torch.equal(draw(other).logp, draw(policy).logp)


def wrong(act=None, log_probs=None):
    module = Plain()
    module.act = (lambda obs, generator: act) if act is not None else module.act
    module.log_probs = (lambda obs, actions: log_probs) if log_probs is not None else module.log_probs
    return ModuleAdapter(module, D)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (torch.zeros(B, D), "returned Tensor; expected two tensors"),
        ((torch.zeros(B, D),), "returned 1 things; expected two tensors"),
        ((torch.zeros(B, D + 1), torch.zeros(B)), r"shape \(3, 3\); expected \(3, 2\), with chunk=1 and action_size=2"),
        ((torch.zeros(B, D), torch.zeros(B, D)), r"logp of the shape \(3, 2\); expected \(3, 1\) or \(3,\)"),
        ((torch.full((B, D), math.nan), torch.zeros(B)), "not finite"),
    ],
)
def test_what_a_module_returns_wrongly_is_named(answer, message):
    with pytest.raises(UserError, match=message):
        draw(wrong(act=answer))


def test_what_a_module_lacks_is_named():
    with pytest.raises(UserError, match="Linear has no method act and no method log_probs"):
        ModuleAdapter(nn.Linear(2, 2), D)
    with pytest.raises(UserError, match="must be 1, chunk or"):
        ModuleAdapter(Plain(), D, K, decisions=3)
    with pytest.raises(UserError, match=r"Plain.log_probs returned logp of the shape \(7,\)"):
        wrong(log_probs=torch.zeros(7)).log_probs(make_inputs(), torch.zeros(B, 1, D))


# ---- weight ----


def test_importing_the_policies_loads_nothing_heavy():
    code = (
        "import sys; import robotics.policies.small, robotics.policies.flow, robotics.policies.vlm, "
        "robotics.policies.gaussian, robotics.episodes.collect; print(*[name for name in ('transformers', 'diffusers', "
        "'mujoco', 'PIL', 'sklearn', 'open3d', 'peft') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""
