"""Rows and decisions that D3S leaves out do not pass the policy."""

import pytest
import torch

from mmrl.core.rollouts import SAMPLED
from mmrl.training import recipe as stages
from mmrl.training import update
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import make_accelerator, seed_everything
from mmrl.training.trainer import Trainer
from mmrl.vlm.vlm_recipe import VlmRecipe
from tests.contracts.domains import DOMAINS

ROWS = 16


def step(folder, monkeypatch, preset="d3s", skips=True, **options):
    """Rows, read tokens and scored tokens of each pass of one step, and its gradient."""
    folder.mkdir()
    domain = DOMAINS["vlm"]
    config = domain.make_config(domain.recipe, folder)
    config.objective = ObjectiveConfig(preset=preset, weight=options)
    config.trainer.tasks_per_step, config.trainer.samples_per_task = 2, ROWS // 2
    config.trainer.steps = 1
    if not skips:
        for module in (stages, update):
            monkeypatch.setattr(module, "rows_under_mask", lambda rollouts: None)
    seed_everything(0)
    recipe = VlmRecipe(config)
    trainer = Trainer(recipe, config, folder / "run", make_accelerator(), None)
    passes, scores = [], recipe.scores

    def noted(policy, rollouts, outputs):
        mask = rollouts.host.mask
        read = torch.arange(1, mask.shape[1] + 1).where(mask > 0, 0).amax(1).sum()
        passes.append((rollouts.num_rows, int(read), int(mask.sum())))
        return scores(policy, rollouts, outputs)

    recipe.scores = noted
    trainer.updater.optimizer.zero_grad = lambda: None  # keep the gradient for a look
    trainer.train_step()
    recipe.close()
    return passes, torch.cat([p.grad.flatten() for p in trainer.policy.parameters() if p.grad is not None])


def test_half_of_the_rows_pass_before_the_update_and_in_it(tmp_path, monkeypatch):
    (old, trained), gradient = step(tmp_path / "few", monkeypatch, rows=0.5, decisions=0.2)
    assert old[0] == ROWS // 2
    assert trained[0] <= old[0], "a row without a chosen decision leaves, too"
    assert trained[1] <= old[1], "what comes after the last trained token of a row is not read"
    assert trained[2] < 0.5 * old[2], "distributions of the chosen tokens only"
    *_, everything = step(tmp_path / "all", monkeypatch, preset="grpo", kind="none")[0]
    assert everything[0] == ROWS
    passes, same = step(tmp_path / "masked", monkeypatch, skips=False, rows=0.5, decisions=0.2)
    assert [rows for rows, _, _ in passes] == [ROWS, ROWS]
    # sums of other order round differently, relative to the largest terms
    torch.testing.assert_close(gradient, same, rtol=0.0, atol=1e-5 * float(same.abs().max()))


def test_rows_that_leave_before_they_are_scored_count_in_their_group(tmp_path, monkeypatch):
    seen, advantages = [], VlmRecipe.advantages
    monkeypatch.setattr(VlmRecipe, "advantages", lambda *given: seen.append(given[1]) or advantages(*given))
    step(tmp_path / "run", monkeypatch, preset="opo", kind="down_sampled", rows=0.5)
    step(tmp_path / "other", monkeypatch, preset="d3s")
    (found, other) = seen
    assert int(found.mask.any(1).sum()) == ROWS // 2
    assert int(found.extras[SAMPLED].any(1).sum()) == ROWS
    assert SAMPLED not in other.extras, "that estimator reads rewards alone"


@pytest.mark.parametrize("rows", [1.0, 0.25])
def test_the_share_of_rows_is_that_of_the_option(tmp_path, monkeypatch, rows):
    passes, _ = step(tmp_path / "run", monkeypatch, rows=rows, decisions=1.0)
    assert [number for number, _, _ in passes] == [int(rows * ROWS)] * 2
    assert passes[0] == passes[1]
