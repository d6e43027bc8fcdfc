"""PROPS: waves, the correction between them, and what the update sees."""

import pytest
import torch

from mmrl.core.payload import to_host
from mmrl.recipes import find_recipe
from mmrl.training.processes import Streams
from mmrl.training.recipe import NoUsableTasksError, Step
from mmrl.training.run import train
from robotics.contrib.props import PropsRecipe
from robotics.episodes.payload import EpisodePayload
from robotics.policies.policy_loading import ActionPolicyConfig
from tests.contracts.domains import domain_of
from tests.robotics.line_demos import BLIND


@pytest.fixture
def config(tmp_path):
    config = domain_of("props").make_config("props", tmp_path)
    config.model = ActionPolicyConfig(kind="small", chunk=2, options={"bins": 8, "encoder": BLIND})
    config.reward.success, config.reward.potential = 0.0, 1.0
    config.trainer.samples_per_task = 1
    config.validate()
    return config


def collected(recipe, tasks=16, seed=0):
    """Rollouts of a step, and the probability under the policy of what each wave sampled."""
    with torch.no_grad():
        return recipe.rollout(recipe.policy, recipe.train_tasks[:tasks], Streams(seed), Step())


def test_the_policy_is_the_same_after_the_waves_and_the_first_wave_is_its_own(config, closing):
    recipe = closing(PropsRecipe(config))
    before = {name: value.clone() for name, value in recipe.policy.state_dict().items()}
    rollouts = collected(recipe)
    after = recipe.policy.state_dict()
    assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []
    assert all(weight.grad is None for weight in recipe.policy.parameters())
    with torch.no_grad():
        own = recipe.scores(recipe.policy, rollouts, frozenset({"logp"})).logp
    apart = ((own - rollouts.logp_old).abs() * rollouts.mask).amax(1)
    assert apart[:2].max() < 1e-5
    assert apart[2:].max() > 1e-3
    assert [episode.layout for episode in EpisodePayload.of(rollouts).episodes] == [
        task.layout for task in recipe.train_tasks[:16]
    ]


def test_a_corrected_batch_is_nearer_to_the_policy(config, closing):
    """With one distribution for all states, the shares of the tokens of a step should be those of the policy."""
    recipe = closing(PropsRecipe(config))
    recipe.policy.policy.encoder.state.weight.data.zero_()

    def apart(waves, seed):
        config.props.waves = waves
        rollouts = collected(recipe, seed=seed)
        payload = EpisodePayload.of(rollouts)
        with torch.no_grad():
            inputs, _, _ = recipe.scored_chunks(rollouts)
            own = recipe.policy.policy.distributions(inputs.select([0])).exp()[0]
        tokens = payload.decisions[payload.steps == 2]
        shares = torch.stack([(tokens == number).float().mean(0) for number in range(8)], 1)
        return len(tokens) * float((shares - own).square().sum())

    config.props.epochs = 4
    found = {waves: sum(apart(waves, seed) for seed in range(8)) for waves in (1, 8)}
    # half of it in runs with more seeds
    assert found[8] < 0.8 * found[1]


def test_a_run_trains_and_resumes_to_the_bit(config, tmp_path):
    config.output_dir = str(tmp_path / "whole")
    train(find_recipe("props"), config)
    config.output_dir, config.trainer.steps = str(tmp_path / "parts"), 1
    train(find_recipe("props"), config)
    config.trainer.steps = 2
    train(find_recipe("props"), config, resume=True)
    folders = [tmp_path / name / "checkpoints/step-000002/model" for name in ("whole", "parts")]
    files = sorted(path.relative_to(folders[0]) for path in folders[0].rglob("*.safetensors"))
    assert files
    assert all((folders[0] / file).read_bytes() == (folders[1] / file).read_bytes() for file in files)


def test_a_wave_whose_environments_all_failed_is_left_out(config, closing, monkeypatch):
    recipe = closing(PropsRecipe(config))
    from robotics.methods import robot_recipe

    run, waves = robot_recipe.run_episodes, []

    def failing(*arguments, **options):
        episodes = run(*arguments, **options)
        waves.append(len(waves))
        if len(waves) - 1 in lost:
            episodes.payload.failed[:] = True
            episodes.payload.reasons[:] = ["lost"] * len(episodes.payload.reasons)
        return episodes

    monkeypatch.setattr(robot_recipe, "run_episodes", failing)
    lost = {0, 3}
    rollouts = collected(recipe)
    failed = to_host([EpisodePayload.of(rollouts).failed])[0]
    assert failed.sum() == 4
    assert not rollouts.mask[failed].any()
    lost = set(range(100))
    with pytest.raises(NoUsableTasksError, match="lost"):
        collected(recipe)


def test_settings_that_contradict_it_are_refused(config):
    config.trainer.old_logp = "auto"
    with pytest.raises(ValueError, match="not sampled by the policy that is trained; set recompute"):
        config.validate()
    config.trainer.old_logp = "recompute"
    config.objective.correction = {"kind": "truncated"}
    with pytest.raises(ValueError, match="remove them"):
        config.validate()
