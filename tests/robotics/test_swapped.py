from dataclasses import replace

import numpy as np
import pytest
import torch

from mmrl.errors import RunError, UserError
from mmrl.recipes import find_recipe
from mmrl.training.run import evaluate
from robotics.episodes.collect import ActingSettings, FirstImages, run_episodes, swap_layouts
from robotics.episodes.payload import EpisodeSetConfig
from robotics.policies.module import ModuleAdapter
from robotics.policies.policy_loading import ActionPolicyConfig
from robotics.sim.episodes import EpisodeSpec
from tests.robotics.line_policies import GaussianWalker
from tests.robotics.line_sim import LineSim
from tests.robotics.test_robot_recipes import grpo


def specs(layouts, task="right"):
    return [EpisodeSpec(task, f"go {task}", layout) for layout in layouts]


class Watcher(GaussianWalker):
    """Records the images that it receives."""

    def __init__(self):
        super().__init__(0.2)
        self.seen = []

    def act(self, obs, generator, temperature=1.0, greedy=False):
        self.seen.append({name: obs[name].numpy().copy() for name in ("images", "state")})
        return super().act(obs, generator, temperature, greedy)


def watch(sim, episodes, **options):
    watcher = Watcher()
    policy = ModuleAdapter(watcher, 1, 1, decisions=1)
    found = run_episodes(
        policy, sim, episodes, ActingSettings(), torch.Generator().manual_seed(0), greedy=True, **options
    )
    return watcher.seen, found


def test_every_episode_sees_the_first_images_of_another_layout_and_its_own_state():
    episodes = [*specs((0, 0, 1, 2)), *specs((5, 6), "left")]
    others = swap_layouts(episodes)
    assert [others[episode].layout for episode in episodes] == [1, 1, 2, 0, 6, 5]  # half the way round
    assert all(others[episode].task == episode.task for episode in episodes)
    sim = LineSim(views=["side"], capacity=4)  # a second wave
    first = LineSim(views=["side"]).reset(episodes).observation
    shown = LineSim(views=["side"]).reset([others[episode] for episode in episodes]).observation
    seen, found = watch(sim, episodes, images_of=[others[episode] for episode in episodes])
    own, _ = watch(LineSim(capacity=4), episodes)
    waves = [step for step, inputs in enumerate(seen) if (inputs["state"][:, 0] == 0).all()]
    assert len(waves) == 2
    for step in (0, 2):
        assert np.array_equal(seen[step]["images"], shown.images[:4])
    assert np.array_equal(seen[waves[1]]["images"], shown.images[4:])
    assert np.array_equal(seen[2]["state"], own[2]["state"])
    assert np.array_equal(found.payload.images[:, 0].numpy(), first.images)  # what is recorded is the episode's own


def test_views_are_those_of_the_other_layout_too():
    sim = LineSim(views=["side"])
    images = FirstImages(sim, specs((3, 4)))
    shown = sim.reset(specs((3, 4))).observation
    begun = sim.reset(specs((0, 1))).observation
    assert np.array_equal(images.replace_in(begun.of([1])).views, shown.views[1:])
    assert np.array_equal(images.replace_in(begun.of([1])).state, begun.state[1:])


def test_what_cannot_be_shown_is_refused():
    with pytest.raises(UserError, match="needs two initial states of each task; left has 1"):
        swap_layouts([*specs((0, 1)), *specs((7, 7), "left")])
    with pytest.raises(RunError, match=r"whose images should be shown did not start: .*layout=3.*would not start"):
        FirstImages(LineSim(never_starts=[3]), specs((2, 3)))

    class Blind(LineSim):
        def reset(self, episodes):
            result = super().reset(episodes)
            return replace(result, observation=replace(result.observation, images=None))

    with pytest.raises(UserError, match=r"set sim\.image_size"):
        FirstImages(Blind(), specs((0, 1)))


@pytest.mark.parametrize("name", ["make_reader", "make_walker"])
def test_success_falls_for_who_looks_and_stays_for_who_does_not(tmp_path, name):
    config = grpo(tmp_path, eval_data={"held_out": EpisodeSetConfig(tasks=["right"], split="held_out", layouts=12)})
    config.model = ActionPolicyConfig(kind=f"tests.robotics.line_policies:{name}", chunk=1, options={"bias": 1.0})
    config.evaluation.swapped, config.evaluation.samples, config.evaluation.videos = True, 1, 0
    metrics = evaluate(find_recipe("robot_grpo"), config)
    assert metrics["held_out/success/greedy"] == 1.0
    if name == "make_walker":  # walks to the right whatever it sees
        assert metrics["held_out/success/greedy_swapped"] == 1.0
        assert metrics["held_out/success/sampled_swapped"] == metrics["held_out/success/sampled"]
    else:
        assert metrics["held_out/success/greedy_swapped"] < 0.8
