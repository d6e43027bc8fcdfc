"""Several cameras: images of simulators, inputs of policies, and refusals."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from mmrl.errors import UserError
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.training.update import count_denominators
from robotics.episodes.collect import ActingSettings, run_episodes
from robotics.episodes.payload import EpisodePayload
from robotics.policies.base.action_policy import PolicyInputs
from robotics.policies.module import ModuleAdapter
from robotics.policies.policy_loading import ActionPolicyConfig, check_fit, load_action_policy
from robotics.sim.episodes import ChunkResult, EpisodeSpec, RobotObservation, views_of
from robotics.sim.gym_adapter import EnvError, GymRow
from robotics.sim.opening import SimConfig, open_video_sim
from tests.robotics.line_sim import LineSim
from tests.robotics.test_opening import opened

PUSH = [EpisodeSpec("push", "", 0), EpisodeSpec("push", "", 3)]
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (2, 6, 5))


def tabletop(**changes):
    return opened(**{"tasks": ["push"], "image_size": 24, "workers": 2, **changes})


def observed(sim):
    """Observations at the beginning and after a chunk."""
    try:
        return [sim.reset(PUSH).observation, sim.step_chunk(ACTIONS).observation]
    finally:
        sim.close()


# ---- observations ----


def test_rows_of_an_observation_keep_their_views():
    views = np.arange(3 * 2 * 4 * 5 * 3, dtype=np.uint8).reshape(3, 2, 4, 5, 3)
    seen = RobotObservation(np.array([1, 4, 6]), np.zeros((3, 1), np.float32), views[:, 0], views)
    chosen = seen.of([1, 6])
    np.testing.assert_array_equal(chosen.views, views[[0, 2]])
    np.testing.assert_array_equal(chosen.images, views[[0, 2], 0])
    empty = ChunkResult.empty(np.arange(2), 1, 1, (4, 5), views=2).observation
    assert empty.views.shape == (2, 2, 4, 5, 3)
    assert ChunkResult.empty(np.arange(2), 1, 1, (4, 5)).observation.views is None


def test_inputs_carry_their_views():
    views = torch.arange(3 * 2 * 4 * 4 * 3, dtype=torch.uint8).reshape(3, 2, 4, 4, 3)
    batch = PolicyInputs(views[:, 0], None, ("a", "b", "c"), views)
    assert torch.equal(batch.select([2, 0]).views, views[[2, 0]])
    assert torch.equal(PolicyInputs.concat([batch.select([0]), batch.select([1, 2])]).views, views)
    assert batch.to("cpu").views is not None
    with pytest.raises(ValueError, match=r"views must be \(B, V, H, W, 3\) uint8; got torch.uint8 \(3, 4, 4, 3\)"):
        PolicyInputs(None, None, ("a", "b", "c"), views[:, 0])
    with pytest.raises(ValueError, match="views has 3 rows, but there are 1 instructions"):
        PolicyInputs(None, None, ("a",), views)


# ---- tabletop ----


@pytest.mark.usefixtures("backend")
def test_views_are_the_images_of_those_cameras_and_change_nothing_else():
    # Four images by one renderer: from the third on it has the parts that never move of a camera that stands still.
    choices = ({"views": ["wrist"]}, {}, {"camera": "wrist", "views": ["front"]}, {"camera": "wrist"})
    found = [observed(tabletop(workers=1, **changes)) for changes in choices]
    for both, front, turned, wrist in zip(*found, strict=True):
        assert both.views.shape == (2, 1, 24, 24, 3)
        for seen, first, second in ((both, front, wrist), (turned, wrist, front)):
            np.testing.assert_array_equal(seen.images, first.images)
            np.testing.assert_array_equal(seen.views[:, 0], second.images)
            np.testing.assert_array_equal(seen.state, front.state)
        assert front.views is None
    first, last = (part.views[0].astype(int) for part in found[0])
    assert np.abs(first - last).mean() > 1, "the wrist's camera has moved"


@pytest.mark.usefixtures("backend")
def test_records_name_views_only_where_there_are_some():
    with tabletop() as plain, tabletop(views=["wrist"]) as sim:
        assert (views_of(plain), views_of(sim)) == ((), ("wrist",))
        assert "views" not in plain.describe()
        assert dict(sim.describe()) == {**plain.describe(), "views": ("wrist",)}


@pytest.mark.usefixtures("backend")
def test_each_camera_has_noise_of_its_own():
    noise = {"sensor_noise": {"image": 8.0}}
    from robotics.sim.randomization import read_randomization

    clean = observed(tabletop(views=["wrist"]))[0]
    noisy = observed(tabletop(views=["wrist"], randomization=read_randomization(noise)))[0]
    alone = observed(tabletop(randomization=read_randomization(noise)))[0]
    np.testing.assert_array_equal(noisy.images, alone.images)
    moved = [noisy.images[0].astype(int) - clean.images[0], noisy.views[0, 0].astype(int) - clean.views[0, 0]]
    assert all(7 < part.std() < 9 for part in moved)
    # The correlation of 1728 independent pairs has a standard deviation of 0.024.
    assert abs(np.corrcoef(moved[0].ravel(), moved[1].ravel())[0, 1]) < 0.12


@pytest.mark.usefixtures("backend")
def test_videos_are_rendered_without_views(closing):
    sim = closing(open_video_sim(SimConfig(tasks=["push"], views=["wrist"]), 48))
    assert views_of(sim) == ()


@pytest.mark.usefixtures("backend")
def test_a_vector_environment_observes_them(closing):
    from robotics.scenes.batch import BatchSettings
    from robotics.scenes.vector_env import TabletopVectorEnv

    settings = BatchSettings(image_size=(16, 24), views=("wrist",))
    envs = closing(TabletopVectorEnv("reach", 2, settings=settings, workers=1))
    first, _ = envs.reset(seed=0)
    assert envs.observation_space["views"].shape == first["views"].shape == (2, 1, 16, 24, 3)
    assert first["views"].std() > 0
    later, *_ = envs.step(ACTIONS[:, 0])
    assert not np.array_equal(first["views"], later["views"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"views": ["top"]}, "no camera 'top'; it has: front, wrist"),
        ({"views": ["front"]}, "the camera front is listed twice: front, front"),
        ({"camera": "wrist", "views": ["wrist"]}, r"sim.views is \[wrist\] with sim.camera 'wrist'"),
        ({"views": ["wrist", "wrist"]}, "list each camera once"),
        ({"views": ["wrist"], "image_size": 0}, r"sim.views is \[wrist\], but sim.image_size is 0"),
        ({"views": ["wrist"], "kind": "gymnasium_robotics"}, "gymnasium_robotics has only one camera"),
        ({"kind": "libero", "options": {"views": ["x"]}}, r"sim.options has views; set sim\.views"),
    ],
)
@pytest.mark.usefixtures("backend")
def test_cameras_that_cannot_be_had_are_named(changes, message):
    with pytest.raises((UserError, ValueError), match=message):
        tabletop(**changes).close()


def one_camera(config):
    """A simulator without views."""
    return LineSim()


def test_a_simulator_of_ones_own_has_to_draw_them():
    with pytest.raises(UserError, match=r"sim.views is \[hand\], but the simulator of .*one_camera observes \[\]"):
        opened(kind="tests.robotics.test_views:one_camera", views=["hand"])
    sim = opened(kind="tests.robotics.line_sim:open_line", views=["hand", "top"])
    assert sim.reset([EpisodeSpec("right", "", 0)]).observation.views.shape == (1, 2, 32, 32, 3)


# ---- environments in processes ----


@pytest.mark.usefixtures("backend")
def test_a_gymnasium_environment_may_offer_cameras(closing):
    env = "robotics.scenes.registration:mmrl/Push-v0"
    options = {"render_mode": "rgb_array", "render_look": "policy", "observation": ["state"], "render_size": [24, 24]}
    options |= {"adapter": {"layout_options": True}}
    shared = {"kind": "gymnasium", "env": env, "horizon": 50, "image_size": 24, "workers": 2, "options": options}
    plain = observed(tabletop(views=["wrist"]))
    sim = closing(opened(**shared, views=["wrist"]))
    name = next(iter(sim.tasks()))
    seen = sim.reset([dataclasses.replace(episode, task=name) for episode in PUSH]).observation
    later = sim.step_chunk(ACTIONS).observation
    assert sim.describe()["views"] == ["wrist"]
    for found, expected in zip((seen, later), plain, strict=True):
        np.testing.assert_array_equal(found.images, expected.images)
        np.testing.assert_array_equal(found.views, expected.views)
    with pytest.raises(UserError, match="no camera 'top'; it has: front, wrist"):
        opened(**shared, views=["top"])


gymnasium = pytest.importorskip("gymnasium", reason="needs pip install 'mmrl-suite[sim]'")


class TwoEyes(gymnasium.Env):
    """Observes two images, and a third of another size."""

    def __init__(self):
        spaces = gymnasium.spaces
        images = {name: spaces.Box(0, 255, shape, np.uint8) for name, shape in SHAPES.items()}
        self.observation_space = spaces.Dict({"angle": spaces.Box(-1, 1, (2,), np.float32), **images})
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        images = {name: np.full(shape, value, np.uint8) for value, (name, shape) in enumerate(SHAPES.items(), 7)}
        return {"angle": np.zeros(2, np.float32), **images}, {}


SHAPES = {"left": (4, 6, 3), "right": (4, 6, 3), "wide": (8, 12, 3)}


def test_entries_of_an_observation_are_views():
    row = GymRow(TwoEyes(), horizon=5, views=["right"])
    assert row.views == ("right",)
    assert (row.render() == 7).all()
    np.testing.assert_array_equal(row.render_views(), np.full((1, 4, 6, 3), 8))
    sized = GymRow(TwoEyes(), horizon=5, views=["wide", "right"], size=4)
    assert sized.render_views().shape == (2, 4, 4, 3)
    assert sized.render_views()[:, 2, 2, 0].tolist() == [9, 8]
    assert sized.render_views()[:, 0, 0, 0].tolist() == [0, 0]  # bars above images that are wider than high


def test_what_an_environment_does_not_show_is_named():
    with pytest.raises(EnvError, match=r"no additional camera 'hand'.*has the images right, wide.*policy_image"):
        GymRow(TwoEyes(), horizon=5, views=["hand"])
    with pytest.raises(EnvError, match=r"no additional camera 'left'"):
        GymRow(TwoEyes(), horizon=5, views=["left"])
    with pytest.raises(EnvError, match=r"'wide' .* \(8, 12, 3\); expected \(4, 6, 3\)"):
        GymRow(TwoEyes(), horizon=5, views=["wide"])


# ---- policies ----


class Looker(nn.Module):
    """Drifts by the brightness of the first image and of each view."""

    def __init__(self, cameras=2):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, cameras))

    def _mean(self, obs):
        images = torch.cat([obs["images"][:, None], obs["views"]], 1) if "views" in obs else obs["images"][:, None]
        bright = images.float().mean((2, 3, 4)) / 255
        return (bright @ self.weight)[:, None] * torch.sign(obs["state"][:, 1:] - obs["state"][:, :1]) * 10

    def act(self, obs, generator):
        mean = self._mean(obs)
        actions = mean + 0.3 * torch.randn(mean.shape, generator=generator)
        return actions, self.log_probs(obs, actions)

    def log_probs(self, obs, actions):
        return torch.distributions.Normal(self._mean(obs), 0.3).log_prob(actions)[:, 0]


def test_episodes_keep_the_views_that_the_policy_saw():
    sim, policy = LineSim(capacity=2, views=("hand",)), ModuleAdapter(Looker(), 1)
    specs = [EpisodeSpec(task, task, layout) for task in ("right", "left") for layout in range(2)]
    episodes = run_episodes(policy, sim, specs, ActingSettings(), torch.Generator().manual_seed(0))
    payload = episodes.payload
    assert payload.views.shape == (4, *payload.states.shape[1:2], 1, 32, 32, 3)
    taken = payload.steps > 0
    expected = payload.images[taken].clamp(min=50) - 50
    assert torch.equal(payload.views[taken][:, 0], expected)
    assert not payload.views[~taken].any()
    rows, chunks = taken.nonzero(as_tuple=True)
    inputs = PolicyInputs(
        payload.images[rows, chunks], payload.states[rows, chunks], ("go",) * len(rows), payload.views[rows, chunks]
    )
    logp, _ = policy.log_probs(inputs, payload.decisions[rows, chunks])
    torch.testing.assert_close(logp.detach(), episodes.logp[rows, chunks])
    blind, _ = ModuleAdapter(Looker(1), 1).log_probs(dataclasses.replace(inputs, views=None), payload.decisions[taken])
    assert (blind - logp).abs().max() > 0.1, "the views matter"


def test_episodes_without_views_hold_none():
    policy, specs = ModuleAdapter(Looker(1), 1), [EpisodeSpec("right", "", 0)]
    episodes = run_episodes(policy, LineSim(), specs, ActingSettings(), torch.Generator().manual_seed(0))
    assert episodes.payload.views is None
    assert EpisodePayload.concat([episodes.payload, episodes.payload]).views is None


def test_likelihoods_of_training_are_those_of_acting(tmp_path):
    from robotics.episodes.payload import EpisodeSetConfig
    from robotics.methods.grpo import RobotGrpoConfig, RobotGrpoRecipe

    config = RobotGrpoConfig(data=EpisodeSetConfig(tasks=["right", "left"], layouts=2), output_dir=str(tmp_path))
    config.trainer.samples_per_task = 2
    recipe = RobotGrpoRecipe(config, ModuleAdapter(Looker(3), 1), LineSim(views=("hand", "top")))
    rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
    outputs = recipe.scores(recipe.policy, rollouts, frozenset())
    mask = rollouts.mask > 0
    torch.testing.assert_close(outputs.logp.detach()[mask], rollouts.logp_old[mask])
    outputs.logp[mask].sum().backward()
    assert (recipe.policy.module.weight.grad.abs() > 0).all(), "each camera has its gradient"


def small_policy():
    from tests.robotics.test_serving import tiny_policy

    return tiny_policy(LineSim())


def test_a_policy_of_one_camera_is_not_given_several():
    check_fit(small_policy(), LineSim())
    with pytest.raises(UserError, match=r"sim.views \[hand\], but this SmallVlaPolicy uses at most one camera"):
        check_fit(small_policy(), LineSim(views=("hand",)))
    with pytest.raises(UserError, match=r"sim.views \[hand\], but a policy of model.kind vlm uses at most one camera"):
        load_action_policy(ActionPolicyConfig(kind="vlm"), LineSim(views=("hand",)), 0)


def test_the_number_of_cameras_has_to_fit():
    class Two(ModuleAdapter):
        views, cameras = 1, ("observation.images.base", "observation.images.wrist")

    policy = Two(Looker(), 1)
    check_fit(policy, LineSim(views=("hand",)))
    message = r"sees 2 cameras: observation.images.base, observation.images.wrist; .*sim.views \[{}\]"
    with pytest.raises(UserError, match=message.format("")):
        check_fit(policy, LineSim())
    with pytest.raises(UserError, match=message.format("a, b")):
        check_fit(policy, LineSim(views=("a", "b")))


# ---- demonstrations ----


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, backend):
    """Demonstrations with two cameras."""
    pytest.importorskip("av", reason="needs pip install 'mmrl-suite[vlm]'")
    from robotics.toy.tabletop_demos import build_demonstrations

    folder = tmp_path_factory.mktemp("views") / "demos"
    return build_demonstrations(str(folder), tasks=["reach"], episodes=1, image_size=32, views=["wrist"])


def test_demonstrations_hold_each_camera_by_its_name(recorded):
    from robotics.data import LeRobotReader
    from robotics.episodes.demonstrations import DemonstrationConfig, load_demonstrations

    images = LeRobotReader(recorded).episode(0).images
    assert set(images) == {"front", "wrist"}
    found = load_demonstrations(DemonstrationConfig(str(recorded), views=["wrist"]))
    batch = found.observations(found.transitions[:3])
    np.testing.assert_array_equal(batch.images, images["front"][:3])
    np.testing.assert_array_equal(batch.views[:, 0], images["wrist"][:3])
    assert batch.views.float().std() > 1
    plain = load_demonstrations(DemonstrationConfig(str(recorded)))
    assert plain.observations(plain.transitions[:1]).views is None
    assert plain.digest() != found.digest()
    with pytest.raises(UserError, match=r"demonstrations.views has 'top', but .* has front, wrist"):
        load_demonstrations(DemonstrationConfig(str(recorded), views=["top"]))
    with pytest.raises(ValueError, match=r"demonstrations.views is \[front\].*list each camera once"):
        DemonstrationConfig(str(recorded), views=["front"]).validate()


def clone_recipe(folder, output, cameras, **changes):
    from robotics.episodes.demonstrations import DemonstrationConfig
    from robotics.methods.clone import CloneConfig, CloneRecipe

    about = DemonstrationConfig(str(folder), views=["wrist"])
    config = CloneConfig(demonstrations=about, output_dir=str(output), **changes)
    sim = opened(tasks=["reach"], image_size=32, workers=1, views=["wrist"])
    return CloneRecipe(config, ModuleAdapter(Cloned(cameras), 5), sim)


class Cloned(Looker):
    """As Looker, for the tabletop's actions."""

    def _mean(self, obs):
        images = torch.cat([obs["images"][:, None], obs["views"]], 1)
        return (images.float().mean((2, 3, 4)) / 255 @ self.weight)[:, None].expand(-1, 5)


def test_cloning_gives_the_policy_both_cameras(recorded, tmp_path, closing):
    recipe = closing(clone_recipe(recorded, tmp_path, 2))
    rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:4], Streams(0), Step())
    assert rollouts.payload.inputs.views.shape == (4, 1, 32, 32, 3)
    recipe.loss(recipe.policy, rollouts, count_denominators(recipe, rollouts), Step()).loss.backward()
    assert (recipe.policy.module.weight.grad.abs() > 0).all()
    recipe.config.demonstrations.views = []
    with pytest.raises(UserError, match=r"lists 0 cameras in addition to .*, but the policy uses 1"):
        recipe._check_views()


# ---- serving ----


def test_a_served_policy_reads_the_images_of_further_cameras():
    pytest.importorskip("msgpack", reason="needs pip install 'mmrl-suite[serve]'")
    from robotics.serving.messages import BadMessageError
    from robotics.serving.observations import ObservationFormat, ServeConfig

    read = ObservationFormat((None, None), None, ServeConfig(prompt="go"), views=1)
    image, wrist = np.zeros((8, 6, 3), np.uint8), np.full((8, 6, 3), 7, np.uint8)
    message = {"observation/image": image, "observation/wrist_image": wrist}
    inputs = read.read(message)
    assert (inputs.images.shape, inputs.views.shape) == ((1, 8, 6, 3), (1, 1, 8, 6, 3))
    assert (inputs.views == 7).all()
    assert read.example().views.shape == (1, 1, 64, 64, 3)
    assert list(read.describe()) == ["observation/image", "observation/wrist_image", "prompt"]
    with pytest.raises(BadMessageError, match="observation/wrist_image is missing; expected uint8"):
        read.read({"observation/image": image})
    with pytest.raises(BadMessageError, match=r"wrist_image has the shape \(4, 6, 3\); expected \(8, 6, 3\)"):
        read.read(message | {"observation/wrist_image": wrist[:4]})
    with pytest.raises(UserError, match=r"uses 2 cameras besides the first, but view_keys lists 1: .*wrist_image"):
        ObservationFormat((8, 6), None, ServeConfig(), views=2)
    one = ObservationFormat((8, 6), None, ServeConfig(prompt="go"))
    assert one.read(message).views is None
    assert one.unused(message) == ["observation/wrist_image"]
    with pytest.raises(ValueError, match="the names must differ"):
        ServeConfig(view_keys=["observation/image"]).validate()


def test_a_robot_with_two_cameras_is_answered():
    pytest.importorskip("websockets", reason="needs pip install 'mmrl-suite[serve]'")
    from tests.robotics.test_serving import ask, robot, running

    policy = ModuleAdapter(Greedy(), 1)
    policy.views = 1
    images = {"image": np.full((8, 8, 3), 51, np.uint8), "wrist_image": np.full((8, 8, 3), 102, np.uint8)}
    with running(policy, image_size=(8, 8)) as server, robot(server) as connection:
        answer = ask(connection, {"observation": {**images, "state": np.float32([0, 0.5])}, "prompt": "go"})
    np.testing.assert_allclose(answer["actions"], [[0.2 + 2 * 0.4]], atol=1e-6)


class Greedy(nn.Module):
    """The brightness of the image and twice that of the view."""

    def act(self, obs, generator, temperature=1.0, greedy=False):
        bright = [part.float().mean((1, 2, 3)) / 255 for part in (obs["images"], obs["views"][:, 0])]
        return (bright[0] + 2 * bright[1])[:, None], torch.zeros(len(bright[0]))

    def log_probs(self, obs, actions):
        raise NotImplementedError


# ---- a run ----

OWN = """
import torch

class Eyes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 5))

    def act(self, obs, generator, temperature=1.0, greedy=False):
        mean = self.mean(obs)
        actions = mean if greedy else mean + 0.1 * torch.randn(mean.shape, generator=generator)
        return actions, self.log_probs(obs, actions)

    def mean(self, obs):
        return sum(part.float().mean((1, 2, 3))[:, None] / 255 * w for part, w in
                   zip((obs["images"], *obs["views"].unbind(1)), self.weight, strict=True))

    def log_probs(self, obs, actions):
        return torch.distributions.Normal(self.mean(obs), 0.1).log_prob(actions).sum(-1)
"""
RUN = """
recipe: robot_grpo
output_dir: run
sim: {tasks: [reach], image_size: 16, views: [wrist], horizon: 4, workers: 1}
model: {kind: "my_eyes.py:Eyes", chunk: 1}
data: {tasks: [reach], layouts: 2}
reward: potential
trainer: {steps: 1, tasks_per_step: 1, samples_per_task: 2, threads: 1, learning_rate: 1.0e-2}
tracking: {quiet: true, tensorboard: false}
"""


@pytest.mark.usefixtures("backend")
def test_a_run_trains_with_two_cameras_and_its_policy_acts_with_them(tmp_path, monkeypatch, closing):
    from mmrl.cli import main
    from robotics.scenes.envs import TabletopEnv
    from robotics.serving.acting import PolicyActor

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mmrl.report.page.write_report", lambda run_dir: None)
    (tmp_path / "my_eyes.py").write_text(OWN)
    (tmp_path / "run.yaml").write_text(RUN)
    assert main(["train", "run.yaml"]) == 0
    actor = PolicyActor(tmp_path / "run")
    assert (actor.options["camera"], actor.options["views"]) == ("", ("wrist",))  # "" is that of the scene
    weight = actor._served.policy.module.weight.detach().cpu()
    assert (weight - 1).abs().min() > 1e-4, "both cameras have learned"
    env = closing(TabletopEnv("reach", **actor.options))
    seen, _ = env.reset(options={"layout": 0})
    actor.reset(0)
    bright = torch.tensor([seen["rgb"].mean() / 255, seen["views"][0].mean() / 255], dtype=torch.float32)
    torch.testing.assert_close(torch.from_numpy(actor.act(env, seen)), (bright @ weight).clamp(-1, 1))
