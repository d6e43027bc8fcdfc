"""VL-DAC on a tiny model: the critic's inputs, the trained weights, and refused settings."""

import json

import pytest
import torch

from mmrl.agents.agent_recipe import AgentConfig
from mmrl.agents.environments.environment import ActionConfig
from mmrl.agents.methods.vl_dac import VlDacConfig, VlDacRecipe
from mmrl.agents.rollout.conversation import ConversationConfig
from mmrl.agents.rollout.episodes import AgentPayload, EpisodeConfig
from mmrl.agents.rollout.turns import TurnSampler
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.errors import UserError
from mmrl.recipes import RECIPES, find_recipe
from mmrl.training.objectives import ObjectiveConfig, make_objective
from mmrl.training.processes import Streams
from mmrl.training.recipe import Reference, Step
from mmrl.training.run import train
from mmrl.training.settings import CheckpointConfig
from mmrl.training.update import count_denominators, update_constants
from mmrl.vlm.data.prompt import join_prompts
from mmrl.vlm.engine.rows import split_row
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig
from mmrl.vlm.model.model_config import CriticSettings, ModelConfig
from tests.agents.runs import TALK, run_config
from tests.rounding import assert_equal_up_to_rounding

CRITIC = CriticSettings(hidden=[16, 8], stop_gradient=True)


def make_config(tmp_path, model, critic=CRITIC, **changes) -> VlDacConfig:
    parts = {
        "recipe": "vl_dac",
        "conversation": ConversationConfig(system="Speak."),
        "actions": ActionConfig(format="text", on_parse_error="noop"),
        "sampler": SamplerConfig(max_new_tokens=4, stop=[*"aeiou"]),
        "checkpoint": CheckpointConfig(every=1, keep=0),
    }
    steps = {"steps": 3, "tasks_per_step": 3, "samples_per_task": 1, "epochs": 2, "micro_batch": 1}
    config = run_config(VlDacConfig, tmp_path, model, TALK, workers=2, steps=steps, **parts | changes)
    config.model.critic = critic
    config.validate()
    return config


def scramble(head: torch.nn.Module) -> None:
    """A critic with other values than 0."""
    for number, parameter in enumerate(head.parameters()):
        torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(number))


@pytest.fixture
def recipes(closing):
    def make(config):
        made = closing(VlDacRecipe(config))
        scramble(made.policy.value_head)
        return made

    return make


def rolled(recipe, tasks=3):
    rollouts = recipe.score(recipe.rollout(recipe.policy, recipe.train_tasks[:tasks], Streams(0), Step()), Step())
    return update_constants(recipe, recipe.policy, Reference("none", recipe.policy), rollouts, Step())


def test_the_warm_up_moves_the_critic_alone(tmp_path, folder):
    run_dir = train(RECIPES["vl_dac"], make_config(tmp_path, folder))
    start = load_policy(ModelConfig(path=str(folder))).state_dict()
    heads = []
    for step in (1, 2, 3):
        saved = run_dir / f"checkpoints/step-{step:06d}/model"
        policy = load_policy(ModelConfig(path=str(saved), critic=CRITIC), value_head=True)
        moved = [name for name, value in start.items() if not torch.equal(policy.state_dict()[name], value)]
        assert bool(moved) == (step == 3), "bit for bit the model that it began with"
        heads.append(policy.value_head.state_dict()["4.weight"])
    assert not torch.equal(heads[0], torch.zeros_like(heads[0]))
    assert not torch.equal(heads[0], heads[1])
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert ["loss/policy" in row for row in rows] == [False, False, True]
    assert all(row["loss/value"] > 0 for row in rows)
    assert rows[2]["policy/kl_ref"] >= 0


def test_the_value_of_a_turn_is_that_of_the_state_before_its_first_token(tmp_path, folder, recipes):
    recipe = recipes(make_config(tmp_path, folder))
    rollouts = rolled(recipe)
    payload = AgentPayload.of(rollouts)
    for row, episode in enumerate(payload.episodes):
        second = payload.inserts[row][0].stop
        for place in (0, second):
            assert rollouts.mask[row, place] == 1
            value = value_behind(recipe.policy, episode, payload, row, place)
            assert_equal_up_to_rounding(rollouts.values[row, place], value)


def value_behind(policy, episode, payload, row, place):
    """The critic's value at the start of an answer at `place`, with the conversation read as one prompt."""
    inserts = [insert for insert in payload.inserts[row] if insert.start < place]
    context = [context for context in payload.contexts[row] if context.start == place]
    parts = [episode.prompt, *split_row(payload.response_ids[row, :place], inserts)]
    prompt = context[0].prompt if context else join_prompts(parts)
    with torch.no_grad():
        return policy.value_head(policy.encode_prefix([prompt]).last_state)[0, 0]


@pytest.mark.parametrize("window", [0, 1])
def test_a_truncated_episode_bootstraps_from_the_last_observation(tmp_path, folder, recipes, window):
    config = make_config(
        tmp_path,
        folder,
        episode=EpisodeConfig(max_turns=1),
        conversation=ConversationConfig(system="", history_images=window),
        objective=ObjectiveConfig(preset="vl_dac", advantage={"truncation": "bootstrap"}),
    )
    recipe = recipes(config)
    rollouts = rolled(recipe)
    payload = AgentPayload.of(rollouts)
    advantages = recipe.objective.replace(scaling=type(recipe.objective.scaling)()).compute_advantages(rollouts)
    for row, episode in enumerate(payload.episodes):
        place = episode.trajectory.bootstrap_index
        assert rollouts.mask[row, place:].sum() == 0, "it is not trained"
        value = value_behind(recipe.policy, episode, payload, row, place)
        assert_equal_up_to_rounding(rollouts.extras["bootstrap_value"][row], value)
        expected = episode.rewards[0] + 0.99 * value - rollouts.values[row, 0]
        assert_equal_up_to_rounding(advantages.advantage[row, 0], expected, passes=2)  # two values
    unscored = rollouts.replace(logp_old=torch.zeros_like(rollouts.logp_old))
    with torch.no_grad():
        logp = recipe.scores(recipe.policy, unscored, frozenset({"logp"})).logp
    assert_equal_up_to_rounding(logp, rollouts.logp_old)


def test_a_last_state_that_does_not_fit_is_masked(tmp_path, folder, recipes, monkeypatch):
    monkeypatch.setattr(TurnSampler, "room", lambda self, rows: [0] * len(rows))
    objective = ObjectiveConfig(preset="vl_dac", advantage={"truncation": "bootstrap"})
    recipe = recipes(make_config(tmp_path, folder, episode=EpisodeConfig(max_turns=1), objective=objective))
    rollouts = rolled(recipe)
    assert bool(rollouts.extras["bootstrap_value"].isnan().all())
    assert recipe.objective.advantage(rollouts).abs().sum() == 0


def test_a_terminated_episode_has_no_bootstrap(tmp_path, folder, recipes):
    objective = ObjectiveConfig(preset="vl_dac", advantage={"truncation": "bootstrap"})
    rollouts = rolled(recipes(make_config(tmp_path, folder, objective=objective)))
    assert [episode.ending for episode in AgentPayload.of(rollouts).episodes] == ["terminated"] * 3
    assert rollouts.extras["bootstrap_value"].tolist() == [0.0] * 3


def test_every_token_of_an_answer_is_trained(tmp_path, folder, recipes, monkeypatch):
    """The first one of each turn too, and one with the number 0, which the public code leaves out; without a KL term,
    where its loss is no scalar."""
    recipe = recipes(make_config(tmp_path, folder, objective=ObjectiveConfig(preset="vl_dac", kl={"kind": "none"})))
    rollouts = recipe.score(recipe.rollout(recipe.policy, recipe.train_tasks[:3], Streams(0), Step()), Step())
    assert 0 not in recipe.policy.banned_ids.tolist()
    AgentPayload.of(rollouts).response_ids[:, 0] = 0
    rollouts = update_constants(recipe, recipe.policy, Reference("none", recipe.policy), rollouts, Step())
    rollouts = recipe.objective.compute_advantages(rollouts)
    assert float(rollouts.advantage[rollouts.mask > 0].abs().min()) > 0
    with torch.no_grad():
        now = recipe.scores(recipe.policy, rollouts, frozenset({"logp", "values"}))
    assert now.logp.dtype == now.values.dtype == torch.float32
    assert bool(torch.isfinite(now.logp[:, 0]).all())
    logp = now.logp.requires_grad_()
    monkeypatch.setattr(recipe, "scores", lambda *_: PolicyOutputs(logp, values=now.values))
    loss = recipe.loss(recipe.policy, rollouts, count_denominators(recipe, rollouts), Step(2)).loss
    assert loss.shape == ()
    (gradient,) = torch.autograd.grad(loss, logp)
    assert bool(((gradient != 0) == (rollouts.mask > 0)).all())


@pytest.mark.parametrize("stop", [True, False])
def test_the_critics_gradient_ends_at_the_state_where_asked(folder, tmp_path, recipes, stop):
    recipe = recipes(make_config(tmp_path, folder, critic=CriticSettings(hidden=[16], stop_gradient=stop)))
    rollouts = recipe.score(recipe.rollout(recipe.policy, recipe.train_tasks[:1], Streams(0), Step()), Step())
    recipe.scores(recipe.policy, rollouts, frozenset({"logp", "values"})).values.sum().backward()
    moved = {name.split(".")[0] for name, p in recipe.policy.named_parameters() if p.grad is not None}
    assert moved == ({"value_head"} if stop else {"value_head", "model"})


def test_a_critic_with_hidden_layers_is_restored_bit_for_bit(folder, tmp_path):
    config = ModelConfig(path=str(folder), dtype="bfloat16", critic=CRITIC)
    policy = load_policy(config, value_head=True)
    assert {p.dtype for p in policy.value_head.parameters()} == {torch.float32}
    assert [tuple(p.shape)[:1] for p in policy.value_head.parameters()] == [(16,), (16,), (8,), (8,), (1,), (1,)]
    again = load_policy(config, value_head=True).value_head.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in policy.value_head.state_dict().items())
    scramble(policy.value_head)
    policy.save_pretrained(tmp_path)
    other = load_policy(ModelConfig(path=str(tmp_path), critic=CRITIC), value_head=True).value_head.state_dict()
    assert all(torch.equal(value, other[name]) for name, value in policy.value_head.state_dict().items())
    with pytest.raises(UserError, match="do not fit"):
        load_policy(ModelConfig(path=str(tmp_path)), value_head=True)


def test_what_would_train_nothing_is_refused(tmp_path, folder):
    with pytest.raises(ValueError, match="has no critic"):
        make_config(tmp_path, folder, objective=ObjectiveConfig(preset="reinforce_pp"))
    with pytest.raises(ValueError, match="there would be no exploration"):
        make_config(tmp_path, folder, sampler=SamplerConfig(top_k=1))
    config = AgentConfig(recipe="agent", output_dir=str(tmp_path), model=ModelConfig(path=str(folder), critic=CRITIC))
    with pytest.raises(ValueError, match=r"model\.critic is set"):
        config.validate()
    with pytest.raises(UserError, match="must be at least 1"):
        ModelConfig(path=str(folder), critic=CriticSettings(hidden=[0])).validate()


def test_both_presets_are_those_of_the_table():
    """arXiv 2508.04280, appendix B, and configs/miniworld_qwen2vl.yaml of corl-team/VL-DAC."""
    expected = {"vl_dac": (5e-5, 1e-7, 0.15, 0.05, 0.99, 0.95), "vl_dac_repo": (1e-6, 1e-8, 0.5, 0.04, 0.9, 0.95)}
    for name, numbers in expected.items():
        config = find_recipe(name).default_config()
        objective, trainer = make_objective(config.objective), config.trainer
        gae = objective.advantage
        rates = (trainer.learning_rate, trainer.final_learning_rate)
        assert (*rates, objective.value.coef, objective.kl.coef, gae.gamma, gae.lam) == numbers
        assert (objective.clip.low, objective.clip.high, objective.value.clip) == (0.1, 0.1, 0.1)
        assert (trainer.epochs, trainer.schedule, trainer.adam_eps, trainer.max_grad_norm) == (2, "cosine", 1e-7, 0.01)
        lora = config.model.lora
        assert (lora.enabled, lora.rank, lora.alpha, lora.dropout) == (True, 16, 32, 0.1)
        assert (config.model.critic.hidden, config.model.critic.stop_gradient) == ([3072, 2048], True)
        assert (config.warmup_updates, config.conversation.history_images) == (2, 4)
