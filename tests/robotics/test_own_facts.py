"""Facts about users' environments that are read or named: reused arrays, unseeded generators, cameras, shadows."""

import logging
from pathlib import Path

import numpy as np
import pytest

from mmrl.errors import UserError
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from robotics.episodes.payload import EpisodeSetConfig
from robotics.methods.grpo import RobotGrpoRecipe
from robotics.policies.policy_loading import ActionPolicyConfig, check_fit, load_action_policy
from robotics.sim.backends import Backend
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.opening import SimConfig, open_sim
from tests.robotics.test_robot_recipes import grpo, trainer

ENVS = Path(__file__).with_name("own_envs.py")


def config(name, **changes):
    given = {"kind": "gymnasium", "env": f"{ENVS}:{name}", "horizon": 5, "image_size": 0, "workers": 2}
    return SimConfig(**(given | changes))


def test_observations_of_the_past_and_frames_are_their_own_where_an_environment_reuses_its_arrays(closing):
    sim = closing(open_sim(config("DictImg", image_size=16)))
    first = sim.reset([EpisodeSpec("DictImg", "", layout) for layout in (0, 1)], past=2)
    kept = first.observation.images.copy(), first.observation.state.copy()
    result = sim.step_chunk(np.zeros((2, 3, 1)), record=[0])
    assert np.array_equal(first.observation.images, kept[0])
    assert np.array_equal(first.observation.state, kept[1])
    assert result.frames[0][:, 0, 0, 0].tolist() == [1, 2, 3]
    assert result.observation.state[:, 1].tolist() == [3, 3]
    assert result.observation.past_state[:, :, 1].tolist() == [[1, 2]] * 2
    assert result.observation.past_images[:, :, 0, 0, 0].tolist() == [[1, 2]] * 2


def test_generators_that_all_code_shares_are_seeded_with_the_episode(closing):
    spec = EpisodeSpec("Drawn", "", 3)
    sim = closing(open_sim(config("Drawn")))
    states = [sim.reset([spec, spec]).observation.state for _ in range(2)]
    other = sim.reset([EpisodeSpec("Drawn", "", 4)]).observation.state
    assert np.array_equal(states[0], states[1])
    assert np.array_equal(states[0][0], states[0][1])
    assert not np.array_equal(other[0], states[0][0])


@pytest.mark.parametrize(("kind", "alike"), [("shared", True), ("own", False)])
def test_unequal_starts_of_compared_episodes_are_named(tmp_path, caplog, kind, alike):
    settings = {
        "model": ActionPolicyConfig(kind="gaussian", chunk=1),
        "data": EpisodeSetConfig(layouts=2),
        "eval_data": {},
        "trainer": trainer(tasks_per_step=2, samples_per_task=2),
    }
    chosen = grpo(tmp_path, **settings)
    chosen.sim = config("Drawn", options={"kind": kind})
    recipe = RobotGrpoRecipe(chosen)
    with caplog.at_level(logging.WARNING, logger="mmrl"):
        for step in range(2):
            recipe.rollout(recipe.policy, recipe.train_tasks, Streams(0), Step(step))
    recipe.close()
    assert caplog.text.count("do not start from the same state: the state differs") == (not alike)


def opened(caplog, name, **changes):
    with caplog.at_level(logging.WARNING, logger="mmrl"):
        return open_sim(config(name, **changes))


def test_a_camera_that_is_not_square_is_padded_and_named(caplog):
    sim = opened(caplog, "Wide", image_size=32)
    image = sim.reset([EpisodeSpec("Wide", "", 0)]).observation.images[0]
    sim.close()
    assert (sim.image_fit, "renders 48 x 96 pixels" in caplog.text) == ("pad", True)
    assert (image[8:24] == 255).all()
    assert not image[:8].any()
    assert not image[24:].any()


@pytest.mark.parametrize(("adapter", "fit"), [({"fit": "stretch"}, "stretch"), ({"size": None}, None)])
def test_a_policy_whose_processor_does_otherwise_is_refused(caplog, adapter, fit):
    sim = opened(caplog, "Wide", image_size=32, options={"adapter": adapter})
    policy = load_action_policy(ActionPolicyConfig(kind="tests.robotics.line_policies:make_walker", chunk=1), sim, 0)
    sim.close()
    assert (sim.image_fit, bool(caplog.text)) == (fit, fit is not None)
    policy.image_fit = "pad"
    if fit is None:
        check_fit(policy, sim)
        assert sim.image_size == (48, 96)
        return
    with pytest.raises(
        UserError,
        match=r"'pad' for non-square images, but the simulator uses 'stretch'\. Set sim\.options\.adapter {fit: pad}",
    ):
        check_fit(policy, sim)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("shadows", "image_size", "said"), [(True, 8, True), (False, 8, False), (True, 0, False)])
def test_shadows_that_a_renderer_on_the_cpu_draws_are_named(caplog, shadows, image_size, said):
    sim = opened(caplog, "Lit", image_size=image_size, options={"shadows": shadows})
    sim.close()
    slow = sim.renderer is not None and sim.renderer.on_cpu
    assert ("2 lights of" in caplog.text) == (said and slow)


def test_renderers_on_the_cpu_are_told_from_their_device():
    assert Backend("egl", "llvmpipe (LLVM 15.0.6, 256 bits), 4.5 Mesa 22.3.6").on_cpu
    assert Backend("osmesa", "unknown device").on_cpu
    assert not Backend("egl", "NVIDIA H100 PCIe/PCIe/SSE2, 4.6.0 NVIDIA 550.54").on_cpu
