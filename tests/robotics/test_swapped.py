import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from mmrl.recipes import find_recipe
from mmrl.training.runs import evaluate
from robotics.sim.episodes import EpisodeSpec
from robotics.vla.collect import ActingSettings, run_episodes
from robotics.vla.loading import ActionPolicyConfig
from robotics.vla.module_adapter import ModuleAdapter
from robotics.vla.swapped import SwappedPictures
from robotics.vla.tasks import EpisodeSetConfig
from tests.robotics.line_policies import GaussianWalker
from tests.robotics.line_sim import LineSim
from tests.robotics.test_robot_recipes import grpo


def specs(layouts, task="right"):
    return [EpisodeSpec(task, f"go {task}", layout) for layout in layouts]


class Watcher(GaussianWalker):
    """Keeps the pictures that it is shown."""

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


def test_every_episode_sees_the_first_pictures_of_another_layout_and_its_own_state():
    episodes = [*specs((0, 0, 1, 2)), *specs((5, 6), "left")]
    first = LineSim().reset(episodes).observation.images
    seen, found = watch(LineSim(), episodes, swapped=SwappedPictures())
    shown = [2, 2, 3, 0, 5, 4]  # half the way round the layouts of the task
    for step in (0, 2):
        assert np.array_equal(seen[step]["images"], first[shown])
    own, _ = watch(LineSim(), episodes)
    assert np.array_equal(seen[2]["state"], own[2]["state"])
    assert np.array_equal(found.payload.images[:, 0].numpy(), first)  # what is recorded is the episode's own


def test_layouts_of_earlier_batches_count():
    sim, swapped = LineSim(views=["side"]), SwappedPictures()
    begun = sim.reset(specs((3, 4))).observation
    swapped.begin(specs((3, 4)), begun)
    alone = sim.reset(specs((4,))).observation
    swapped.begin(specs((4,)), alone)
    assert np.array_equal(swapped(alone).images, begun.images[:1])
    assert np.array_equal(swapped(alone).views, begun.views[:1])


def test_one_initial_state_or_no_pictures_are_refused():
    with pytest.raises(UserError, match="at least two initial states of right in a batch; there is layout 7 only"):
        watch(LineSim(), specs((7, 7)), swapped=SwappedPictures())
    blind = LineSim()
    begun = blind.reset(specs((0, 1))).observation
    with pytest.raises(UserError, match=r"set sim\.image_size"):
        SwappedPictures().begin(specs((0, 1)), type(begun)(begun.rows, begun.state, None))


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
