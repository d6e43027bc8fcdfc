"""Memory plans of masked-diffusion language models."""

import pytest

from mmrl.masked.masked_plan import footprint
from mmrl.masked.masked_sampler import MaskedSampling
from mmrl.recipes import RECIPES, plan_of
from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.toy.signs import build_model
from tests.contracts.domains import domain_of
from tests.contracts.options import with_changes
from tests.peaks import check_plan, measured_peaks

RUNS = {
    "one_step": {},
    "elbo": {"objective.preset": "bgpo"},
    "chunks": {"objective.preset": "bgpo", "likelihood.chunk": 2},
}


def test_activations_shrink_with_the_chunks_of_draws(tmp_path):
    config = domain_of("masked").make_config("masked", tmp_path)
    whole, chunks = (footprint(with_changes(config, RUNS[name])).held("update") for name in ("elbo", "chunks"))
    assert chunks < whole / 2


@pytest.mark.parametrize("name", ["masked", "masked_sft"])
def test_the_recipes_have_a_plan(name, tmp_path):
    plan = plan_of(RECIPES[name])(domain_of(name).make_config(name, tmp_path))
    assert plan.peak() > plan.held("always") > 0
    assert (plan.held("sampling") > 0) == (name == "masked")


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_plan_is_the_measured_peak_of_a_run(name, tmp_path):
    config = domain_of("masked").make_config("masked", tmp_path)
    config.model.path = str(build_model(tmp_path / "model", mask=True, hidden=128, layers=4, max_positions=128))
    config.sampler = MaskedSampling(max_new_tokens=32, block=32, steps=4)
    config.trainer.tasks_per_step, config.trainer.samples_per_task = 4, 8
    config = with_changes(config, RUNS[name])
    peaks, rollouts = measured_peaks(config, tmp_path / "run")
    prompts = VlmPayload.of(rollouts).prompts
    check_plan(footprint(config, prompt_tokens=round(sum(map(len, prompts)) / len(prompts))), peaks)
