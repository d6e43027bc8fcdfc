"""SRPO with every kind of latent, end to end on the line, in one process and in two."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from mmrl.errors import RunError, UserError
from mmrl.recipes import find_recipe
from mmrl.runs.checkpoint import Checkpoints
from mmrl.training.processes import make_accelerator
from mmrl.training.recipe import Step
from mmrl.training.run import train
from mmrl.training.trainer import collect_metrics
from robotics.episodes.payload import EpisodeSetConfig
from robotics.methods.latents import LatentConfig
from robotics.methods.progress import ProgressSettings
from robotics.methods.srpo import SrpoRecipe
from robotics.policies.policy_loading import ActionPolicyConfig
from tests.programs import run_processes
from tests.robotics.line_sim import LineSim
from tests.robotics.test_robot_recipes import SCALE, collected, srpo, trainer
from tests.robotics.tiny_models import save_tiny_video_encoder, save_tiny_vjepa2

KINDS = ("pixels", "video", "vjepa2")
ONE_CENTRE = ProgressSettings(min_samples=10_000)
"""Nothing clusters, so that the mean of the successes is the only centre."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Builds each latent's model once, if it has one."""
    made = {"pixels": ""}
    makers = {"video": save_tiny_video_encoder, "vjepa2": save_tiny_vjepa2}

    def folder(kind):
        if kind not in made:
            made[kind] = str(makers[kind](tmp_path_factory.mktemp("latent") / kind))
        return made[kind]

    return folder


def latent_of(kind, folders, frames="step"):
    return LatentConfig(kind=kind, frames=frames, path=folders(kind))


def expected_rewards(latents, success):
    """Distance to the mean success, brought to 0..1 over the failures, through the published sigmoid."""
    points, centre = latents.astype(np.float64), latents[success].astype(np.float64).mean(0)
    far = np.linalg.norm(points - centre, axis=1)
    share = (far - far[~success].min()) / (far[~success].max() - far[~success].min())
    return np.where(success, 1.0, 0.6 / (1 + np.exp(-10 * (0.5 - share))))


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_are_those_of_the_formula(tmp_path, folders, kind):
    recipe = SrpoRecipe(srpo(tmp_path, latent=latent_of(kind, folders), progress=ONE_CENTRE))
    rollouts = collected(recipe)
    payload = rollouts.payload
    success = payload.success.numpy()
    assert 0 < success.sum() < len(success) - 1
    videos = [payload.frames_of(row) for row in range(len(success))]
    assert [len(video) for video in videos] == (payload.lengths + 1).tolist()
    latents = recipe.latent.embed(videos, [payload.path(row) for row in range(len(success))]).latents
    np.testing.assert_allclose(rollouts.reward, expected_rewards(latents, success), atol=1e-4)
    terms = rollouts.reward_terms
    np.testing.assert_array_equal(terms["success"], success)
    assert bool(torch.isnan(terms["progress"][payload.success]).all())
    torch.testing.assert_close(terms["progress"][~payload.success], rollouts.reward[~payload.success])


@pytest.mark.parametrize("kind", KINDS)
def test_training_runs_with_every_latent(tmp_path, folders, kind):
    model = ActionPolicyConfig(kind="tests.robotics.line_policies:make_walker", chunk=1, options={"bias": 0.3})
    config = srpo(tmp_path, latent=latent_of(kind, folders), trainer=trainer(steps=2), model=model)
    run_dir = train(find_recipe("srpo"), config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert [row["srpo/invalid_latents"] for row in rows if "srpo/clusters" in row] == [0, 0]
    assert all(0 < row["optim/grad_norm"] < 100 for row in rows if "srpo/clusters" in row)
    weights = [run_dir / "checkpoints" / f"step-{step:06d}" / "model" / "model.safetensors" for step in (1, 2)]
    assert weights[0].read_bytes() != weights[1].read_bytes()


def test_images_of_every_step_are_rendered_only_on_request(tmp_path, folders):
    whole = SrpoRecipe(srpo(tmp_path, latent=latent_of("pixels", folders)))
    assert all(video is not None for video in collected(whole).payload.frames)
    seldom = SrpoRecipe(srpo(tmp_path, latent=latent_of("pixels", folders, frames="chunk")))
    assert collected(seldom).payload.frames == []
    state = LatentConfig(kind="state", options=SCALE)  # looks at no images, whatever it is to have
    assert collected(SrpoRecipe(srpo(tmp_path, latent=state))).payload.frames == []


class BlindSim(LineSim):
    image_size = None


def test_images_cannot_be_compared_if_none_are_rendered(tmp_path, folders):
    with pytest.raises(UserError, match=r"latent\.kind is 'pixels', but the simulator renders no images"):
        SrpoRecipe(srpo(tmp_path, latent=latent_of("pixels", folders)), sim=BlindSim())


def test_an_episode_without_a_latent_has_no_gradient_and_is_counted(tmp_path, folders, monkeypatch):
    recipe = SrpoRecipe(srpo(tmp_path, latent=latent_of("pixels", folders)))
    prepare, seen = recipe.latent._prepare, []

    def some_fail(frames, states):
        seen.append(len(frames))
        if len(seen) in (1, 8):
            raise ValueError("no image")
        return prepare(frames, states)

    monkeypatch.setattr(recipe.latent, "_prepare", some_fail)
    rollouts = collected(recipe)
    assert torch.isnan(rollouts.reward).nonzero().flatten().tolist() == [0, 7]
    assert collect_metrics(recipe, rollouts, Step())["srpo/invalid_latents"] == 2


def test_a_step_without_any_latent_stops_with_the_reason(tmp_path, folders, monkeypatch, caplog):
    recipe = SrpoRecipe(srpo(tmp_path, latent=latent_of("pixels", folders)))

    def fails(frames, states):
        raise ValueError("out of memory")

    monkeypatch.setattr(recipe.latent, "_prepare", fails)
    with pytest.raises(RunError, match=r"no episode of this step has a latent: out of memory; latent\.kind is pixels"):
        collected(recipe)
    assert "an episode has no latent and is excluded from the update: out of memory" in caplog.text


BY_STATE = ProgressSettings(preset="initial_state", min_samples=10_000)
FITTED = LatentConfig(kind="state", frames="chunk")


def test_a_latent_is_fitted_to_the_first_step_and_then_frozen(tmp_path):
    recipe = SrpoRecipe(srpo(tmp_path, latent=FITTED, progress=BY_STATE))
    assert recipe.latent.size == 0
    rollouts = collected(recipe, seed=2)
    assert (rollouts.reward[~rollouts.payload.success] > 0).any()
    paths = np.concatenate([rollouts.payload.path(row) for row in range(rollouts.num_rows)])
    found = recipe.latent.state_dict()
    np.testing.assert_allclose(found["mean"], paths.astype(np.float64).mean(0))
    collected(recipe, seed=2)
    assert recipe.latent.state_dict() == found


@pytest.mark.parametrize("cut", [1, 2])
def test_a_latent_that_is_fitted_survives_an_interruption(tmp_path, cut):
    changes = {"latent": FITTED, "progress": BY_STATE, "data": EpisodeSetConfig(tasks=["right"], layouts=4)}
    whole = train(find_recipe("srpo"), srpo(tmp_path / "a", trainer=trainer(steps=3), **changes))
    train(find_recipe("srpo"), srpo(tmp_path / "b", trainer=trainer(steps=cut), **changes))
    resumed = train(find_recipe("srpo"), srpo(tmp_path / "b", trainer=trainer(steps=3), **changes), resume=True)
    weights = [path / "checkpoints" / "step-000003" / "model" / "model.safetensors" for path in (whole, resumed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


class PosedLineSim(LineSim):
    """Reports the position of the point as that of the task's object."""

    def _result(self, rows, rewards, steps):
        poses = np.tile(np.eye(4), (len(rows), 1, 1))
        poses[:, 0, 3] = self.place[rows]
        return replace(super()._result(rows, rewards, steps), object_poses=poses)


def test_the_true_position_as_a_latent(tmp_path):
    config = srpo(tmp_path, latent=LatentConfig(kind="object"), progress=BY_STATE)
    recipe = SrpoRecipe(config, sim=PosedLineSim())
    rollouts = collected(recipe)
    payload, groups = rollouts.payload, rollouts.group.numpy()
    success, place = payload.success.numpy(), payload.last_state[:, 0].numpy()
    assert rollouts.payload.frames == []
    for group in range(4):
        won, lost = (np.flatnonzero((groups == group) & (success == told)) for told in (True, False))
        if len(won):
            centre = place[won].mean()
            share = 1 - np.abs(place[lost] - centre) / centre  # every episode begins at 0
            np.testing.assert_allclose(rollouts.reward[torch.from_numpy(lost)], 0.6 * share.clip(0, 1), atol=1e-5)


def test_a_simulator_without_positions_is_named(tmp_path):
    recipe = SrpoRecipe(srpo(tmp_path, latent=LatentConfig(kind="object")))
    with pytest.raises(UserError, match=r"latent\.kind is 'object', but this simulator does not report"):
        collected(recipe)


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_from_the_first_frame_with_references_of_the_initial_state(tmp_path, folders, kind):
    """Every latent; the references are those of the batch and, at the second batch, those of the first too."""
    recipe = SrpoRecipe(srpo(tmp_path, latent=latent_of(kind, folders), progress=BY_STATE))
    kept = {}
    for seed in (0, 1):
        rollouts = collected(recipe, seed=seed)
        payload, groups = rollouts.payload, rollouts.group.numpy()
        videos, paths = zip(*((payload.frames_of(row), payload.path(row)) for row in range(len(groups))), strict=True)
        ends = recipe.latent.embed(videos, paths).latents.astype(np.float64)
        begins = recipe.latent.embed([video[:1] for video in videos], [path[:1] for path in paths]).latents
        success = payload.success.numpy()
        for group in range(4):
            won, lost = (np.flatnonzero((groups == group) & (success == told)) for told in (True, False))
            kept[group] = np.concatenate([kept.get(group, ends[:0]), ends[won]])
            expected = np.zeros(len(lost))
            if len(kept[group]):
                gaps = (np.linalg.norm(part[lost] - kept[group].mean(0), axis=1) for part in (ends, begins))
                expected = 0.6 * (1 - np.divide(*gaps)).clip(0, 1)
            np.testing.assert_allclose(rollouts.reward[torch.from_numpy(lost)], expected, atol=1e-4)
    names = [f"right/train/{episode.layout}" for episode in payload.episodes]
    assert {name: len(found) for name, found in recipe.memory.references().items()} == {
        name: len(kept[group]) for group, name in enumerate(names) if len(kept[group])
    }
    assert sum(map(len, kept.values())) > len(ends[success])


def test_states_without_a_success_borrow_those_of_the_task(tmp_path):
    by_state, borrowing = (
        SrpoRecipe(srpo(tmp_path, progress=ProgressSettings(preset="initial_state", memory=0, task_fallback=fallback)))
        for fallback in (False, True)
    )
    plain, borrowed = (collected(recipe) for recipe in (by_state, borrowing))
    success, groups = plain.payload.success, plain.group
    lonely = torch.tensor([not bool(success[groups == group].any()) for group in groups.tolist()])
    assert lonely.any()
    assert success.any()
    assert not lonely.all()
    torch.testing.assert_close(borrowed.reward[~lonely], plain.reward[~lonely])
    assert (plain.reward[lonely] == 0).all()
    assert borrowed.reward[lonely].max() > 0
    metrics = collect_metrics(borrowing, borrowing.advantages(borrowed, make_accelerator(), Step()), Step())
    assert metrics["srpo/tasks_with_fallback"] == len(set(groups[lonely].tolist())) / 4
    assert metrics["srpo/tasks_without_reference"] == 0


def test_progress_from_the_first_frame_agrees_with_the_simulator_and_shuffled_rewards_do_not(tmp_path):
    recipes = [
        SrpoRecipe(srpo(tmp_path, progress=BY_STATE, trainer=trainer(samples_per_task=30), shuffle_failures=shuffle))
        for shuffle in (False, True)
    ]
    accelerator = make_accelerator()
    plain, shuffled = (recipe.advantages(collected(recipe), accelerator, Step()) for recipe in recipes)
    found, control = (
        collect_metrics(recipe, each, Step()) for recipe, each in zip(recipes, (plain, shuffled), strict=True)
    )
    assert found["srpo/agreement"] > 0.7
    assert abs(control["srpo/agreement"]) < 0.5
    assert found["srpo/advantage_correlation"] > control["srpo/advantage_correlation"] + 0.01
    torch.testing.assert_close(plain.reward[plain.payload.success], shuffled.reward[plain.payload.success])
    assert not torch.equal(plain.reward, shuffled.reward)
    torch.testing.assert_close(plain.reward.sort().values, shuffled.reward.sort().values)


@pytest.mark.parametrize("progress", [ProgressSettings(memory=8), BY_STATE], ids=["task", "initial_state"])
def test_remembered_successes_survive_an_interruption(tmp_path, progress):
    changes = {"progress": progress, "shuffle_failures": True, "data": EpisodeSetConfig(tasks=["right"], layouts=4)}
    whole = train(find_recipe("srpo"), srpo(tmp_path / "a", trainer=trainer(steps=2), **changes))
    train(find_recipe("srpo"), srpo(tmp_path / "b", trainer=trainer(steps=1), **changes))
    resumed = train(find_recipe("srpo"), srpo(tmp_path / "b", trainer=trainer(steps=2), **changes), resume=True)
    weights = [path / "checkpoints" / "step-000002" / "model" / "model.safetensors" for path in (whole, resumed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    memories = [
        Checkpoints.load_state(path / "checkpoints" / "step-000002")["recipe"]["memory"] for path in (whole, resumed)
    ]
    assert memories[0]["tasks"] == memories[1]["tasks"]
    assert sum(map(len, memories[0]["latents"])) > 0
    assert all(torch.equal(*pair) for pair in zip(memories[0]["latents"], memories[1]["latents"], strict=True))


@pytest.mark.parametrize(
    ("latent", "message"),
    [
        (LatentConfig(kind="smell"), "latent.kind is 'smell'; allowed: vjepa2, video, pixels, state"),
        (LatentConfig(kind="pixels", options={"sides": 3}), "latent.options has sides; options of pixels are: side"),
        (LatentConfig(kind="video"), "latent.kind=video needs latent.path"),
        (LatentConfig(kind="pixels", frames="all"), "latent.frames is 'all'; allowed: step, chunk"),
        (
            LatentConfig(kind="state", options={"mean": [0.0] * 3, "std": [1.0] * 3}),
            r"scaled to the 3 entries of latent\.options, but the simulator's state has 2",
        ),
    ],
)
def test_bad_latents(tmp_path, latent, message):
    with pytest.raises(UserError, match=message):
        SrpoRecipe(srpo(tmp_path, latent=latent))


# ---- two processes ----


@pytest.mark.slow
def test_references_come_from_all_processes(tmp_path):
    """The first process has all the successes, the second one all the failures."""
    run_processes(["-m", "tests.robotics.two_ranks_srpo", str(tmp_path / "found")], 2)
    winner, loser = (torch.load(tmp_path / f"found.{rank}", weights_only=False) for rank in range(2))
    assert winner["success"].all()
    assert not loser["success"].any()
    assert winner["reward"].tolist() == [1.0] * len(winner["reward"])
    success = np.concatenate([winner["success"], loser["success"]])
    expected = expected_rewards(np.concatenate([winner["latents"], loser["latents"]]), success)
    np.testing.assert_allclose(loser["reward"], expected[len(winner["reward"]) :], atol=1e-5)
    assert loser["reward"].max() == pytest.approx(0.595984, abs=1e-5)
    for found in (winner, loser):
        assert found["metrics"]["srpo/tasks_without_reference"] == 0
        assert len(found["memory"]["right"]) == len(winner["reward"])
    assert winner["metrics"] == pytest.approx(loser["metrics"], nan_ok=True)
    assert winner["metrics"]["episode/success"] == pytest.approx(success.mean())
    assert winner["metrics"]["sim/raised"] == 0
    assert winner["metrics"]["srpo/agreement"] > 0.5  # of the failures, which the first process has none of
    assert winner["fitted"] == loser["fitted"]
    whole = np.concatenate([winner["paths"], loser["paths"]]).astype(np.float64)
    np.testing.assert_allclose(winner["fitted"]["mean"], whole.mean(0), rtol=1e-9)
    assert torch.equal(winner["weights"], loser["weights"])
    assert not torch.equal(winner["weights"], winner["start"])
    for found in (winner, loser):
        assert found["again"] == pytest.approx(found["evaluation"], nan_ok=True)
    # a batch that was cut is run again whole: numbers may depend on what is computed together
    assert (winner["begun"], loser["begun"]) == ([0, 2, 4, 6], [1, 3, 5, 7])
    files = [path.name for path in (tmp_path / "run" / "episodes").glob("*.jsonl")]
    assert len(files) == 1
    lines = [json.loads(line) for line in (tmp_path / "run" / "episodes" / files[0]).open()]
    assert [line["index"] for line in lines] == list(range(8))
