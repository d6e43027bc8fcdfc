"""Scores of latents on a policy's episodes, before anything is trained."""

import numpy as np
import pytest
import yaml

from benchmarks.robotics.latent_check import FORMS, CheckedEpisode, CheckOptions, check_latents, main, score_latent
from mmrl.core import get
from mmrl.errors import UserError
from robotics.methods.latents import LatentConfig, ObjectLatent
from robotics.methods.srpo import SrpoRecipe
from tests.robotics.test_robot_recipes import srpo, trainer
from tests.robotics.test_srpo_latents import PosedLineSim


def episodes(states=4, each=20, seed=0):
    """An object with a different goal for every initial state; the simulator's reward is the completed share of its
    path.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for start in range(states):
        goal = np.float32([start, -start, 1])
        for number in range(each):
            done = 1.0 if number < 3 else rng.uniform(0, 0.9)
            places = np.stack([np.zeros(3, np.float32), (done * goal + rng.normal(0, 0.01, 3)).astype(np.float32)])
            rows.append(CheckedEpisode(None, places, places, "push", f"push/train/{start}", done == 1.0, done))
    return rows


def score(form, rows, samples=10):
    return score_latent(ObjectLatent(), rows, FORMS[form], get("srpo"), samples, CheckOptions(deals=2))


def test_references_of_the_initial_state_rank_where_those_of_the_task_do_not():
    by_task, by_state = (score(form, episodes()) for form in ("task", "initial_state"))
    assert by_state.agreement > 0.95
    assert by_task.agreement < by_state.agreement - 0.2
    assert by_state.advantage_correlation > by_task.advantage_correlation
    assert score("initial_state", episodes()) == by_state


def test_episodes_of_a_policy(tmp_path):
    config = srpo(tmp_path, trainer=trainer(samples_per_task=8), latent=LatentConfig(kind="object"))
    recipe = SrpoRecipe(config, sim=PosedLineSim())
    found = {
        (kind, form): each for kind, form, each in check_latents(recipe, ["object", "state"], CheckOptions(32, deals=2))
    }
    assert list(found) == [(kind, form) for kind in ("object", "state") for form in FORMS]
    assert found["object", "initial_state"].agreement > 0.9
    assert np.isfinite(list(found.values())).all()


def test_what_cannot_be_checked_is_refused(tmp_path):
    recipe = SrpoRecipe(srpo(tmp_path))
    with pytest.raises(UserError, match="unknown latent smell; available: vjepa2, video"):
        list(check_latents(recipe, ["smell"], CheckOptions()))
    with pytest.raises(UserError, match="does not report the object's pose"):
        list(check_latents(recipe, ["object"], CheckOptions(episodes=4)))
    with pytest.raises(UserError, match="an initial state has 20 episodes, but a step needs 30; run more episodes"):
        score("task", episodes(), samples=30)
    with pytest.raises(UserError, match="episodes is 0; must be at least 1"):
        list(check_latents(recipe, ["state"], CheckOptions(episodes=0)))


def test_the_command_prints_a_table_or_what_is_wrong(tmp_path, capsys):
    config = {
        "recipe": "srpo",
        "output_dir": str(tmp_path / "run"),
        "sim": {"kind": "tests.robotics.line_sim:open_line"},
        "model": {"kind": "tests.robotics.line_policies:make_walker", "chunk": 1, "options": {"bias": 0.1}},
        "data": {"tasks": ["right"], "layouts": 4},
        "latent": {"kind": "state"},
        "trainer": {"tasks_per_step": 4, "samples_per_task": 8},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    assert main([str(path), "--episodes", "32", "--deals", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["latent", *["state"] * len(FORMS)]
    assert main([str(path), "--latents", "smell"]) == 2
    assert "unknown latent smell" in capsys.readouterr().err
