from dataclasses import replace

import pytest

from mmrl.core import CATALOGUE, AdvantageOptions, Objective, get


@pytest.mark.parametrize("name", CATALOGUE)
def test_rows_are_valid_and_cite_their_paper(name):
    objective = get(name)
    objective.validate()
    assert objective.name == name
    assert "arXiv" in objective.citation


def test_the_rows_the_suite_promises():
    promised = "grpo dr_grpo dapo rloo reinforce_pp reinforce_pp_baseline gspo cispo ppo"
    assert set(promised.split()) <= set(CATALOGUE)


def test_constants_of_the_papers():
    assert (get("grpo").clip_low, get("grpo").kl_coef, get("grpo").aggregation) == (0.2, 0.04, "sequence_mean")
    assert (get("dapo").clip_high, get("dapo").filter, get("dapo").needs_reference) == (0.28, "resample", False)
    assert (get("gspo").clip_low, get("gspo").clip_high) == (3e-4, 4e-4)
    assert get("ppo").advantage_options.lam == 0.95


def test_unknown_method_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"no objective 'grop'\. Did you mean 'grpo'"):
        get("grop")


def test_what_an_objective_needs():
    assert get("ppo").needs_values
    assert not get("grpo").needs_values
    assert get("grpo").needs_reference
    assert not replace(get("grpo"), kl_coef=0.0).needs_reference
    assert not get("grpo").needs_entropy
    assert replace(get("grpo"), entropy="full", entropy_coef=0.01).needs_entropy
    assert not replace(get("grpo"), entropy="sampled", entropy_coef=0.01).needs_entropy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantage": "group_mean_stdd"}, "no advantage estimator.*Did you mean 'group_mean_std'"),
        ({"surrogate": "ppo"}, "no surrogate 'ppo'.*ppo_clip"),
        ({"ratio": "row"}, "no ratio 'row'"),
        ({"kl": "k4"}, "no KL estimator 'k4'"),
        ({"entropy": "exact"}, "no entropy term 'exact'.*full, sampled"),
        ({"filter": "resampel"}, "Did you mean 'resample'"),
        ({"aggregation": "mean"}, "no aggregation 'mean'"),
        ({"kl_aggregation": "mean"}, "kl_aggregation"),
        ({"clip_low": 1.5}, "clip_low is 1.5"),
        ({"clip_high": -0.1}, "clip_high is -0.1"),
        ({"dual_clip": 1.0}, "dual_clip is 1.0"),
        ({"dual_clip": 3.0, "surrogate": "cispo"}, "no dual clip"),
        ({"dual_clip": 3.0, "surrogate": "unclipped"}, "does not clip"),
        ({"dual_clip": 3.0, "surrogate": "bgpo"}, "does not clip"),
        ({"surrogate": "gspo"}, "clips whole rows"),
        ({"surrogate": "cispo", "ratio": "sequence_full"}, "detaches the ratio"),
        ({"surrogate": "policy_gradient", "ratio": "sequence"}, "uses no ratio"),
        ({"ratio": "sequence_full", "advantage": "gae", "value_coef": 0.1}, "differs inside a row"),
        ({"ratio": "sequence_product", "advantage": "whitened_returns"}, "differs inside a row"),
        ({"kl_coef": 0.1}, "no divergence is chosen"),
        ({"kl_in_reward": True}, "no divergence is chosen"),
        ({"kl": "full", "kl_coef": 0.1, "kl_in_reward": True}, "cannot go into the reward"),
        ({"kl": "k3p", "kl_coef": 0.1, "kl_in_reward": True}, "Use kl='k3'"),
        ({"kl": "k1", "kl_coef": 0.1, "kl_in_reward": True, "kl_aggregation": "token_mean"}, "has no effect"),
        ({"entropy_coef": 0.1}, "entropy is None"),
        ({"aggregation": "fixed_length"}, "needs fixed_length >= 1"),
        ({"fixed_length": 100}, "has no effect"),
        ({"value_coef": 0.1}, "uses no critic"),
        ({"advantage": "gae"}, "value_coef is 0"),
        ({"filter_low": 0.1}, "no effect with filter='none'"),
        ({"filter": "drop", "filter_low": 0.9, "filter_high": 0.1}, "must lie below"),
        ({"advantage_options": AdvantageOptions(ddof=2)}, "ddof is 2"),
        ({"advantage_options": AdvantageOptions(gamma=1.1)}, "gamma is 1.1"),
        ({"advantage_options": AdvantageOptions(singleton="drop")}, "singleton is drop"),
        ({"advantage_options": AdvantageOptions(gaps="hop")}, "gaps is hop"),
        ({"advantage_options": AdvantageOptions(clip=0.0)}, r"clip is 0\.0; expected positive, or None"),
        ({"advantage_options": AdvantageOptions(scale=-1.0)}, r"scale is -1\.0; expected positive and finite"),
        ({"advantage_options": AdvantageOptions(scale=float("nan"))}, "scale is nan"),
    ],
)
def test_contradictions_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"(?s)objective 'mine' cannot be used.*{message}"):
        Objective(name="mine", **changes).validate()


def test_all_problems_are_listed_at_once():
    with pytest.raises(ValueError, match=r"(?s)- kl_coef.*- entropy_coef"):
        Objective(name="mine", kl_coef=0.1, entropy_coef=0.1).validate()


def test_description_shows_the_formula_with_its_constants():
    text = get("grpo").describe()
    for part in ("2402.03300", "(R_i - mean_g R) / (std_g R + 1e-06)", "clip(r_it, 0.8, 1.2)", "0.04 * mean (exp("):
        assert part in text
    text = get("ppo").describe()
    for part in ("lambda 0.95", "whitened", "at most -3 A_it", "0.1 * mean 0.5", "R_it <- R_it - 0.05"):
        assert part in text
    assert "stopgrad(clip(r_it, 0, 5)) A_it logp_it" in get("cispo").describe()
    assert "rows * 3000" in get("dr_grpo").describe()
    assert "replaced by sampling" in get("dapo").describe()
    assert "clip(r_it, 0.9997, 1.0004)" in get("gspo").describe()


def test_description_shows_what_was_changed():
    changed = replace(
        get("dapo"), filter_low=0.01, filter_high=0.99, kl="k3", kl_coef=0.5, kl_aggregation="sequence_mean",
        entropy="full", entropy_coef=0.003,
    )  # fmt: skip
    text = changed.describe()
    for part in ("between 0.01 and 0.99", "within +-10", "KL averages: mean over the rows", "(-0.003) * mean H_it"):
        assert part in text


def test_description_shows_limits_and_factors_of_advantages():
    options = AdvantageOptions(eps=1e-4, clip=5.0, scale=0.2)
    mine = Objective(
        name="mine", advantage="group_mean_global_std", advantage_options=options, surrogate="bgpo", filter="drop"
    )
    text = mine.describe()
    for part in (
        "(R_i - mean_g R) / (std of all R + 0.0001)",
        "; then limited to +-5; then times 0.2",
        "[-A_it (1 + log r_it) where A_it >= 0, -A_it r_it elsewhere]",
    ):
        assert part in text
    assert "then" not in replace(mine, advantage_options=AdvantageOptions()).describe()


def test_an_invalid_objective_has_no_description():
    with pytest.raises(ValueError, match="cannot be used"):
        Objective(name="mine", kl_coef=0.1).describe()
