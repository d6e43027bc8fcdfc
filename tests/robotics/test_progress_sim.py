"""SRPO's progress as the reward of every look."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.methods.latents import LatentConfig
from robotics.methods.progress import ProgressSettings
from robotics.methods.progress_sim import PotentialConfig, ProgressSim
from robotics.sim.episodes import EpisodeSpec
from tests.robotics.line_demos import demonstrate
from tests.robotics.line_sim import LineSim
from tests.robotics.offpolicy.line_sac import sac_config, trainer_of


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    return demonstrate(tmp_path_factory.mktemp("progress") / "demos", episodes=4)


def played(demos, move, steps=4):
    sim = ProgressSim(LineSim(), PotentialConfig(demonstrations=str(demos)))
    sim.reset([EpisodeSpec("right", "go right", 0)])
    found = []
    for _ in range(steps):
        if len(sim.live):
            found.append(sim.step_chunk(np.full((1, 1, 1), move)))
    return found


def test_progress_rises_towards_the_demonstrations_and_not_away_from_them(demos):
    towards = [float(result.rewards[0, 0]) for result in played(demos, 0.5)]
    away = [float(result.rewards[0, 0]) for result in played(demos, -0.5)]
    assert 0 < towards[0] < towards[1] < towards[2] <= 0.6
    assert away == [0.0] * 4
    ended = played(demos, 1.0, 12)[-1]
    assert ended.success.all()
    assert ended.rewards[0, 0] == 1


def test_steps_before_the_end_of_a_chunk_keep_the_earlier_value(demos):
    sim = ProgressSim(LineSim(), PotentialConfig(demonstrations=str(demos)))
    sim.reset([EpisodeSpec("right", "go right", 0)])
    first = sim.step_chunk(np.full((1, 2, 1), 0.5)).rewards[0]
    second = sim.step_chunk(np.full((1, 2, 1), 0.5)).rewards[0]
    assert first[0] == 0 < first[1] == second[0] < second[1]


def test_a_run_learns_from_it(tmp_path, demos):
    config = sac_config(tmp_path, potential=1.0)
    config.potential = PotentialConfig(demonstrations=str(demos))
    config.validate()
    trainer = trainer_of(config, tmp_path, 2)
    trainer.run()
    rewards = np.array(trainer.recipe.replay.index.records["rewards"])
    assert ((rewards <= 0.6) | (rewards == 1)).all()
    assert len(np.unique(rewards)) > 3
    trainer.recipe.close()


def test_a_camera_that_the_demonstrations_lack_is_named(demos, monkeypatch):
    latent = SimpleNamespace(looks_at="robot", needs_images=True)
    monkeypatch.setattr("robotics.methods.progress_sim.make_latent", lambda config: latent)
    with pytest.raises(UserError, match=r"potential\.camera is 'front', but .* has no cameras"):
        ProgressSim(LineSim(), PotentialConfig(demonstrations=str(demos), latent=LatentConfig(kind="video")))


def test_what_does_not_fit_is_refused(tmp_path, demos):
    with pytest.raises(UserError, match="no success of 'go left'"):
        ProgressSim(LineSim(), PotentialConfig(demonstrations=str(demonstrate(tmp_path / "one", episodes=1))))
    video = PotentialConfig(demonstrations=str(demos), latent=LatentConfig(kind="object"))
    with pytest.raises(UserError, match="have no poses of the object"):
        ProgressSim(LineSim(), video)
    with pytest.raises(ValueError, match=r"only norm: initial with references: task"):
        PotentialConfig(demonstrations=str(demos), progress=ProgressSettings()).validate()
    named = LineSim()
    named.state_names = ("goal", "position")
    info = demos / "meta/info.json"
    content = json.loads(info.read_text())
    content["features"]["observation.state"]["names"] = ["position", "goal"]
    ordered = tmp_path / "ordered"
    shutil.copytree(demos, ordered)
    (ordered / "meta/info.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="the same names in a different order"):
        ProgressSim(named, PotentialConfig(demonstrations=str(ordered)))
    ProgressSim(named, PotentialConfig(demonstrations=str(ordered)), accept_other=["state"])
    config = sac_config(tmp_path, potential=None)
    config.potential = PotentialConfig(demonstrations=str(demos))
    with pytest.raises(ValueError, match=r"reward\.potential is not; give it a weight"):
        config.validate()
