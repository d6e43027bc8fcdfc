"""Behaviour cloning on the line: transitions, their loss, the loop, and actions in other units than the simulator's."""

import json
import logging
import shutil

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from mmrl.recipes import find_recipe
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.training.run import train
from mmrl.training.settings import BaseTrainerConfig, CheckpointConfig, TrackingConfig
from mmrl.training.trainer import collect_metrics
from mmrl.training.update import count_denominators
from robotics.data import EpisodeWriter, LeRobotReader, robot_features
from robotics.data.reader import LazyImages
from robotics.episodes.collect import ActingSettings, replay_episode, run_episodes
from robotics.episodes.demonstrations import DemonstrationConfig, Demonstrations, load_demonstrations
from robotics.episodes.payload import EpisodeSetConfig
from robotics.methods.clone import CloneConfig, CloneRecipe
from robotics.methods.grpo import RobotGrpoConfig, RobotGrpoRecipe
from robotics.policies.base.action_policy import ActionChoice, ActionPolicy, open_policy
from robotics.policies.base.action_statistics import ActionStatistics, StateStatistics
from robotics.policies.module import ModuleAdapter
from robotics.policies.policy_loading import ActionPolicyConfig
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.opening import SimConfig
from tests.robotics.line_demos import BLIND, ENCODER, SPEED, demonstrate
from tests.robotics.line_sim import LineSim

K = 3
LINE = "tests.robotics.line_sim:open_line"


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    return demonstrate(tmp_path_factory.mktemp("line") / "demos")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return demonstrate(tmp_path_factory.mktemp("line") / "recorded", episodes=3, camera="front", failures=[1])


@pytest.fixture(scope="module")
def stretched(tmp_path_factory):
    """Actions in units of a quarter: a move of half a step is written as 0.125."""
    return demonstrate(tmp_path_factory.mktemp("line") / "stretched", stretch=0.25)


def clone(tmp_path, demos, **changes):
    about = {"path": str(demos), "camera": "", **changes.pop("demonstrations", {})}
    trainer = {"steps": 3, "tasks_per_step": 8, "learning_rate": 3e-3, "threads": 1, "warmup_steps": 0}
    settings = {
        "recipe": "robot_clone",
        "output_dir": str(tmp_path / "run"),
        "sim": SimConfig(kind=LINE),
        "model": ActionPolicyConfig(chunk=K, options={"bins": 16, "encoder": BLIND}),
        "demonstrations": DemonstrationConfig(**about),
        "eval_data": {"held_out": EpisodeSetConfig(split="held_out", layouts=6)},
        "trainer": BaseTrainerConfig(**{**trainer, **changes.pop("trainer", {})}),
        "tracking": TrackingConfig(quiet=True, tensorboard=False),
        "checkpoint": CheckpointConfig(every=1, keep=5),
    }
    config = CloneConfig(**(settings | changes))
    config.evaluation.videos = 0
    config.validate()
    return config


def collected(recipe, transitions=None, seed=0):
    chosen = recipe.train_tasks if transitions is None else transitions
    return recipe.rollout(recipe.policy, chosen, Streams(seed), Step())


# ---- transitions and their loss ----


def test_every_control_step_is_a_transition_with_its_next_actions(tmp_path, demos):
    recipe = CloneRecipe(clone(tmp_path, demos))
    reader = LeRobotReader(demos)
    assert len(recipe.train_tasks) == sum(len(episode) for episode in reader)
    payload = collected(recipe).payload
    for row, (number, step) in enumerate(recipe.train_tasks):
        episode = reader.episode(number)
        np.testing.assert_array_equal(payload.inputs.state[row], episode.state[step])
        assert payload.inputs.instructions[row] == episode.task
        left = min(K, len(episode) - step)
        assert payload.mask[row].tolist() == [1.0] * left + [0.0] * (K - left)
        np.testing.assert_array_equal(payload.actions[row, :left], episode.action[step : step + left])


def test_loss_is_that_of_the_policy(tmp_path, demos):
    recipe = CloneRecipe(clone(tmp_path, demos))
    rollouts = collected(recipe)
    payload = rollouts.payload
    output = recipe.loss(recipe.policy, rollouts, count_denominators(recipe, rollouts), Step())
    logits = recipe.policy.logits(payload.inputs).detach().numpy().astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    logp = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    tokens = recipe.policy.tokenizer.encode(payload.actions.flatten(1)).numpy()
    chosen = np.take_along_axis(logp, tokens[..., None], -1)[..., 0]
    mask = payload.mask.numpy()
    assert 0 < mask.mean() < 1
    assert float(output.loss.detach()) == pytest.approx(-(chosen * mask).sum() / mask.sum(), rel=1e-5)
    assert output.metrics["bc/loss"].value == pytest.approx(float(output.loss.detach()), rel=1e-6)


def test_what_lies_behind_the_end_of_an_episode_does_not_count(tmp_path, demos):
    recipe = CloneRecipe(clone(tmp_path, demos))
    rollouts = collected(recipe)
    denominators = count_denominators(recipe, rollouts)
    before = recipe.loss(recipe.policy, rollouts, denominators, Step()).loss
    behind = rollouts.payload.mask == 0
    assert behind.any()
    rollouts.payload.actions[behind] = -rollouts.payload.actions[behind]
    assert torch.equal(recipe.loss(recipe.policy, rollouts, denominators, Step()).loss, before)
    rollouts.payload.actions[~behind] *= -1
    assert not torch.equal(recipe.loss(recipe.policy, rollouts, denominators, Step()).loss, before)


def test_a_state_that_hardly_moves_is_warned_about_unless_it_has_a_minimum(tmp_path, demos, monkeypatch, caplog):
    found = StateStatistics(np.zeros(2), np.array([1.0, 1e-3]))
    monkeypatch.setattr(Demonstrations, "state_statistics", lambda self: found)
    recipe = CloneRecipe(clone(tmp_path, demos))
    (message,) = (text for record in caplog.records if "hardly move" in (text := record.getMessage()))
    assert "demonstrations: entry 1 (standard deviation at most 0.001)" in message
    assert "demonstrations.min_state_std" in message
    torch.testing.assert_close(recipe.policy.encoder.scale.std, torch.tensor([1.0, 1e-3]))
    caplog.clear()
    recipe = CloneRecipe(clone(tmp_path, demos, demonstrations={"min_state_std": 0.05}))
    assert "hardly move" not in caplog.text
    torch.testing.assert_close(recipe.policy.encoder.scale.std, torch.tensor([1.0, 0.05]))
    monkeypatch.setattr(type(recipe.policy), "scale_states", ActionPolicy.scale_states)
    with pytest.raises(UserError, match=r"min_state_std is 0\.05, but a .* standardises its states itself"):
        CloneRecipe(clone(tmp_path, demos, demonstrations={"min_state_std": 0.05}))


@pytest.mark.parametrize(
    "model",
    [
        ActionPolicyConfig(chunk=K, options={"bins": 16, "encoder": BLIND}),
        ActionPolicyConfig(kind=f"{__name__}:make_whole_chunks", chunk=K),
    ],
)
def test_micro_batches_change_nothing(tmp_path, demos, model):
    recipe = CloneRecipe(clone(tmp_path, demos, model=model))
    rollouts = collected(recipe)
    denominators = count_denominators(recipe, rollouts)
    gradients, losses = [], []
    for micro in (rollouts.num_rows, 5, 1):
        recipe.policy.zero_grad()
        parts = [recipe.loss(recipe.policy, part, denominators, Step()) for part in rollouts.micro_batches(micro)]
        torch.stack([part.loss for part in parts]).sum().backward()
        losses.append(sum(float(part.loss.detach()) for part in parts))
        given = [weight.grad.flatten() for weight in recipe.policy.parameters() if weight.grad is not None]
        gradients.append(torch.cat(given))
    assert gradients[0].abs().max() > 0
    for other, loss in zip(gradients[1:], losses[1:], strict=True):
        assert loss == pytest.approx(losses[0], rel=1e-5)
        torch.testing.assert_close(other, gradients[0], rtol=1e-4, atol=1e-6)


class WholeChunks(torch.nn.Module):
    """One log-probability for a chunk of three steps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mean = torch.nn.Linear(2, K)

    def act(self, obs, generator, greedy=False):
        mean = self.mean(obs["state"])
        noise = torch.zeros_like(mean) if greedy else torch.randn(mean.shape, generator=generator)
        actions = (mean + noise)[..., None]
        return actions, self.log_probs(obs, actions)

    def log_probs(self, obs, actions):
        return torch.distributions.Normal(self.mean(obs["state"]), 1.0).log_prob(actions[..., 0]).sum(-1)


def make_whole_chunks():
    return WholeChunks()


# ---- the loop ----


@pytest.mark.parametrize("kind", ["small", "gaussian", "flow"])
def test_cloning_learns_the_line(tmp_path, demos, kind):
    own = {"small": {"bins": 16}, "gaussian": {}, "flow": {"steps": 3, "hidden": 32, "blocks": 1}}
    config = clone(
        tmp_path,
        demos,
        model=ActionPolicyConfig(kind=kind, chunk=K, options={"encoder": BLIND} | own[kind]),
        trainer={"steps": 60, "tasks_per_step": 24, "learning_rate": 5e-3, "warmup_steps": 5},
        checkpoint=CheckpointConfig(every=0),
    )
    result = json.loads((train(find_recipe("robot_clone"), config) / "result.json").read_text())
    before, after = result["first_evaluation"]["held_out"], result["last_evaluation"]["held_out"]
    assert before["success/greedy"] <= 0.5
    assert after["success/greedy"] >= 0.9


def test_failures_are_left_out_and_counted(tmp_path, recorded):
    def loaded(**about):
        config = clone(tmp_path, recorded, demonstrations=about)
        recipe = CloneRecipe(config)
        return recipe, collect_metrics(recipe, collected(recipe), Step())

    reader = LeRobotReader(recorded)
    lengths = [len(episode) for episode in reader]
    recipe, metrics = loaded()
    assert metrics["data/skipped"] == 1
    assert metrics["data/transitions"] == lengths[0] + lengths[2]
    assert set(recipe.demonstrations.instructions) == {"go right"}
    assert loaded(only_success=False)[1] == {"data/transitions": float(sum(lengths)), "data/skipped": 0.0}
    assert loaded(max_episodes=1)[1] == {"data/transitions": float(lengths[0]), "data/skipped": 0.0}


def test_images_are_those_of_the_camera(tmp_path, recorded):
    model = ActionPolicyConfig(chunk=K, options={"bins": 16, "encoder": ENCODER})
    recipe = CloneRecipe(clone(tmp_path, recorded, model=model, demonstrations={"camera": "front"}))
    seen = collected(recipe, recipe.train_tasks[:4]).payload.inputs
    np.testing.assert_array_equal(seen.images.numpy(), LeRobotReader(recorded).images(0, "front")[:4])
    loss = recipe.loss(recipe.policy, *_with_denominators(recipe), Step()).loss
    assert bool(torch.isfinite(loss))


def test_decoded_images_are_mapped_from_the_cache(tmp_path, recorded, monkeypatch):
    def load(camera="front"):
        config = DemonstrationConfig(str(recorded), camera=camera, cache=str(tmp_path / "cache"), only_success=False)
        return load_demonstrations(config)

    kept = load_demonstrations(DemonstrationConfig(str(recorded), only_success=False))
    first = load()
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert [path.name for path in files] == [f"episode-{number:06d}.npy" for number in range(3)]
    assert all(isinstance(images, np.memmap) for images in first.images)
    transitions = first.transitions[::3]
    assert torch.equal(first.observations(transitions).images, kept.observations(transitions).images)
    with monkeypatch.context() as patch:
        patch.setattr(LazyImages, "__getitem__", None)  # what is there is not decoded again
        assert torch.equal(load().observations(transitions).images, kept.observations(transitions).images)
    about = recorded / "meta" / "info.json"
    before = about.read_text()
    about.write_text(before.replace('"fps": 10', '"fps": 20'))
    try:
        load()  # another dataset in the same place has images of its own
    finally:
        about.write_text(before)
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 2


def test_a_dataset_that_was_recorded_again_has_images_of_its_own_in_the_cache(tmp_path):
    rows, features = np.zeros((3, 2), np.float32), robot_features(2, 2, {"front": (8, 8)}, video=False)
    for value in (10, 200):
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        with EpisodeWriter(tmp_path / "data", fps=10, features=features) as writer:
            writer.add_episode(rows, rows, {"front": np.full((3, 8, 8, 3), value, np.uint8)}, task="go", success=True)
        config = DemonstrationConfig(str(tmp_path / "data"), cache=str(tmp_path / "cache"))
        assert load_demonstrations(config).images[0][0, 0, 0, 0] == value


def test_each_image_is_decoded_once(recorded, monkeypatch):
    read = []
    decode = LazyImages.__getitem__
    monkeypatch.setattr(LazyImages, "__getitem__", lambda images, camera: read.append(camera) or decode(images, camera))
    found = load_demonstrations(DemonstrationConfig(str(recorded), only_success=False))
    assert len(found.images) == 3
    assert read == ["front"] * 3


def _with_denominators(recipe):
    rollouts = collected(recipe, recipe.train_tasks[:4])
    return rollouts, count_denominators(recipe, rollouts)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"camera": "wrist"}, "camera is 'wrist', but .* has front"),
        ({"path": "nowhere"}, "nowhere"),
        ({"unscaled": [1]}, r"unscaled has \[1\]; an action has 1 entries"),
    ],
)
def test_demonstrations_that_cannot_be_used_are_named(tmp_path, recorded, about, message):
    with pytest.raises(UserError, match=message):
        CloneRecipe(clone(tmp_path, recorded, demonstrations=about, acting=NORMALISED))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"episodes": 2, "failures": [0, 1]}, "has no usable episode; 2 were skipped"),
        ({"episodes": 0}, "has no usable episode"),
    ],
)
def test_data_without_a_success_is_refused(tmp_path, data, message):
    with pytest.raises(UserError, match=message):
        CloneRecipe(clone(tmp_path, demonstrate(tmp_path / "data", **data)))


def test_actions_of_another_robot_are_refused(tmp_path, demos):
    with pytest.raises(UserError, match="have 1 entries, but the simulator's have 2"):
        CloneRecipe(clone(tmp_path, demos, sim=SimConfig(kind=f"{__name__}:open_plane")))


class PlaneSim(LineSim):
    action_size = 2


def open_plane(config):
    return PlaneSim()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"demonstrations": {"path": ""}}, "demonstrations.path is empty"),
        ({"demonstrations": {"max_episodes": -1}}, "max_episodes is -1"),
        ({"acting": ActingSettings(scale="max")}, "acting.scale is 'max'; allowed: none, bounds_q99"),
    ],
)
def test_bad_settings(tmp_path, demos, change, message):
    with pytest.raises(ValueError, match=message):
        clone(tmp_path, demos, **change)


# ---- actions in other units ----

NORMALISED = ActingSettings(scale="bounds_q99")


class Fixed(ModuleAdapter):
    """Always returns the same chunk."""

    def __init__(self, chunk):
        super().__init__(WholeChunks(), len(chunk[0]), len(chunk))
        self.said = torch.tensor(chunk)

    def act(self, batch, generator, temperature=1.0, greedy=False):
        rows = len(batch)
        actions = self.said.expand(rows, -1, -1)
        return ActionChoice(actions, actions.reshape(rows, 1, -1), torch.zeros(rows, 1))


def statistics(low, high, mask):
    low, high = np.float64(low), np.float64(high)
    return ActionStatistics(low, high, low, high, (low + high) / 2, high - low, np.array(mask))


def acted(policy, sim, settings, layouts=1, greedy=True):
    episodes = [EpisodeSpec("right", "go right", layout) for layout in range(layouts)]
    return run_episodes(policy, sim, episodes, settings, torch.Generator().manual_seed(0), greedy=greedy), episodes


@pytest.mark.parametrize("ensemble", [0.0, 0.1])
def test_normalised_actions_are_brought_to_the_simulators_units(ensemble):
    policy = Fixed([[-1.0], [0.0], [0.5]])
    policy.statistics = statistics([-0.2], [0.6], [True])
    sim = LineSim()
    found, episodes = acted(policy, sim, ActingSettings(scale="bounds_q99", ensemble=ensemble, n_action_steps=3))
    expected = 0.5 * (np.array([-1.0, 0.0, 0.5]) + 1) * 0.8 - 0.2
    if ensemble:  # the newest chunk's first entry, and what older ones said of now
        assert found.actions[0][0, 0] == pytest.approx(expected[0], abs=1e-6)
        second = (np.exp(-0.1 * 0) * expected[1] + np.exp(-0.1 * 1) * expected[0]) / (1 + np.exp(-0.1))
        assert found.actions[0][1, 0] == pytest.approx(second, abs=1e-6)
    else:
        np.testing.assert_allclose(found.actions[0][:3, 0], expected, atol=1e-6)
    moved = 0.1 * found.actions[0][:, 0].sum()
    assert float(found.payload.last_state[0, 0]) == pytest.approx(moved, abs=1e-5)
    frames, success = replay_episode(LineSim(), episodes[0], found.actions[0])
    assert len(frames) == len(found.actions[0]) + 1
    assert success == bool(found.payload.success[0])


def test_a_gripper_outside_the_mask_is_left_alone_and_what_is_too_large_is_cut_off():
    policy = Fixed([[0.5, 0.25]])
    policy.statistics = statistics([-4.0, -3.0], [4.0, 3.0], [True, False])
    found, _ = acted(policy, PlaneSim(), NORMALISED)
    np.testing.assert_allclose(found.actions[0][0], [1.0, 0.25], atol=1e-6)


def test_a_policy_without_statistics_cannot_be_scaled():
    with pytest.raises(UserError, match=r"acting\.scale is 'bounds_q99', but the policy has no action statistics"):
        acted(Fixed([[0.5]]), LineSim(), NORMALISED)
    policy = Fixed([[0.5]])
    policy.statistics = statistics([-1.0, -1.0], [1.0, 1.0], [True, True])
    with pytest.raises(UserError, match="statistics have 2 entries, but its actions have 1"):
        acted(policy, LineSim(), NORMALISED)


def test_targets_are_normalised_by_the_datas_quantiles(tmp_path, stretched):
    recipe = CloneRecipe(clone(tmp_path, stretched, acting=NORMALISED))
    everything = np.concatenate([episode.action for episode in LeRobotReader(stretched)])
    low, high = np.quantile(everything.astype(np.float64), [0.01, 0.99], axis=0)
    rollouts = collected(recipe)
    for row, transition in enumerate(recipe.train_tasks):
        raw = recipe.demonstrations.chunks([transition], K)[0][0]
        expected = np.clip(2 * (raw - low) / (high - low + 1e-8) - 1, -1, 1)
        np.testing.assert_allclose(rollouts.payload.actions[row], expected, atol=1e-5)
    back = recipe.policy.statistics.unnormalise(rollouts.payload.actions)
    raw = torch.from_numpy(recipe.demonstrations.chunks(recipe.train_tasks, K)[0])
    torch.testing.assert_close(back, raw, rtol=1e-5, atol=1e-6)
    assert float(raw.abs().max()) == pytest.approx(0.25 * SPEED)
    assert float(rollouts.payload.actions.abs().max()) == pytest.approx(1.0, abs=1e-5)


def test_entries_that_are_not_scaled_keep_their_units(tmp_path, stretched):
    recipe = CloneRecipe(clone(tmp_path, stretched, acting=NORMALISED, demonstrations={"unscaled": [-1]}))
    raw = torch.from_numpy(recipe.demonstrations.chunks(recipe.train_tasks, K)[0])
    assert torch.equal(collected(recipe).payload.actions, raw)
    assert recipe.policy.statistics.mask.tolist() == [False]


def test_a_policy_that_is_not_scaled_has_no_statistics(tmp_path, stretched):
    recipe = CloneRecipe(clone(tmp_path, stretched))
    assert recipe.policy.statistics is None
    with pytest.raises(ValueError, match=r"demonstrations\.unscaled has no effect with acting\.scale=none"):
        clone(tmp_path, stretched, demonstrations={"unscaled": [-1]}).validate()


def test_a_policy_cloned_on_normalised_actions_runs_in_the_simulator(tmp_path, stretched):
    """The data is four times too slow for the horizon of 12, so no policy that moves as demonstrated can succeed."""
    trainer = {"steps": 40, "tasks_per_step": 24, "learning_rate": 5e-3}
    config = clone(tmp_path, stretched, acting=NORMALISED, trainer=trainer, checkpoint=CheckpointConfig(every=0))
    run_dir = train(find_recipe("robot_clone"), config)
    after = json.loads((run_dir / "result.json").read_text())["last_evaluation"]["held_out"]
    assert after["success/greedy"] == 0
    saved = ActionPolicyConfig(path=str(run_dir / "checkpoints" / "step-000040" / "model"))
    rl = RobotGrpoConfig(
        sim=config.sim, model=ActionPolicyConfig(path=str(run_dir)), eval_data=config.eval_data, acting=NORMALISED
    )
    recipe = RobotGrpoRecipe(rl)
    opened = open_policy(run_dir).state_dict()
    assert all(torch.equal(opened[name], weight) for name, weight in recipe.policy.state_dict().items())
    found, _ = acted(recipe.policy, recipe.sim, NORMALISED, layouts=4)
    for actions in found.actions:
        np.testing.assert_allclose(actions, 0.25 * SPEED, atol=0.02)
    with pytest.raises(
        UserError, match=r"'none', but the policy predicts normalised actions: .*; set acting\.scale=bounds_q99"
    ):
        acted(recipe.policy, recipe.sim, ActingSettings())
    recipe.policy.statistics = statistics([-9.0], [9.0], [True])
    recipe.policy.load_weights(saved.path)  # a checkpoint brings its own
    assert recipe.policy.statistics.as_dict() == CloneRecipe(config).policy.statistics.as_dict()
    lines = [json.loads(line) for line in next((run_dir / "episodes").glob("*.jsonl")).open()]
    assert max(abs(entry) for line in lines for action in line["actions"] for entry in action) < 0.15
    protocol = json.loads(next((run_dir / "episodes").glob("*.protocol.json")).read_text())
    assert protocol["scale"]["mask"] == [True]


@pytest.mark.parametrize("scale", ["none", "bounds_q99"])
def test_actions_that_are_cut_off_are_warned_of_and_those_far_outside_are_refused(tmp_path, caplog, scale):
    acting = ActingSettings(scale=scale)
    with caplog.at_level(logging.WARNING, "mmrl"):
        CloneRecipe(clone(tmp_path, demonstrate(tmp_path / "large", episodes=2, stretch=4.0), acting=acting))
    assert "actions of -2 to 2, outside -1..1, in 100.0%" in caplog.text
    far = demonstrate(tmp_path / "far", episodes=2, stretch=8.0)
    with pytest.raises(UserError, match=r"far range from -4 to 4, far outside -1\.\.1.*they are in different units"):
        CloneRecipe(clone(tmp_path, far, acting=acting))
