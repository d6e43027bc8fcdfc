import pytest

from mmrl.contrib.rows.bgpo import Bgpo
from mmrl.core import CATALOGUE, Objective, all_objectives, get
from mmrl.core.blocks import BLOCKS, all_kinds
from mmrl.core.blocks.advantage import AdvantageScaling, GroupMeanGlobalStd, GroupMeanStd
from mmrl.core.blocks.clip import (
    Cispo,
    GspoClip,
    PolicyGradient,
    PpoClip,
    SequenceFullRatio,
    SequenceProductRatio,
    SequenceRatio,
)
from mmrl.core.blocks.credit import Gae, TurnGae, ValueLoss, WhitenedReturns
from mmrl.core.blocks.divergence import K1, K2, K3, ExactKl, FullEntropy, K3StraightThrough, SampledEntropy
from mmrl.core.blocks.filter import DropGroups, Epochs, KeepAll, ResampleGroups
from mmrl.core.loss import FixedLength, SequenceMean, TokenMean
from mmrl.core.objectives.objective import changed as changed_block


@pytest.mark.parametrize("name", all_objectives())
def test_rows_are_valid_and_cite_their_paper(name):
    objective = get(name)
    objective.validate()
    assert objective.name == name
    assert "arXiv" in objective.citation or objective.citation == "maximum likelihood"


def test_the_rows_the_suite_promises():
    promised = "grpo dr_grpo dapo rloo reinforce_pp reinforce_pp_baseline gspo cispo ppo"
    assert set(promised.split()) <= set(CATALOGUE)


def test_dapo_samples_groups_without_a_gradient_again_and_has_no_reference():
    """Checks that its golden numbers (tests/golden/dapo.json) cannot cover."""
    assert isinstance(get("dapo").filter, ResampleGroups)
    assert not get("dapo").needs_reference


def test_unknown_method_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"unknown objective 'grop'; did you mean 'grpo'"):
        get("grop")


def test_what_an_objective_needs():
    assert get("ppo").needs == {"values", "logp_ref"}
    assert get("grpo").needs == {"samples", "logp_ref"}
    assert get("flow_grpo").needs == {"samples", "kl_ref"}
    assert get("grpo").with_kl_coef(0.0).needs == {"samples"}
    assert "entropy" in get("grpo").replace(entropy=FullEntropy(0.01)).needs
    assert "entropy" not in get("grpo").replace(entropy=FullEntropy(0.0)).needs
    assert "entropy" not in get("grpo").replace(entropy=SampledEntropy(0.01)).needs
    assert Objective("mine", advantage=TurnGae(), value=ValueLoss()).needs == {"values", "turns"}
    assert "turns" in Objective("mine", scaling=AdvantageScaling(whiten="turns")).needs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantage": {"kind": "group_mean_stdd"}}, "unknown advantage.*did you mean 'group_mean_std'"),
        ({"clip": {"kind": "ppo"}}, "unknown clip 'ppo'.*ppo_clip"),
        ({"ratio": {"kind": "row"}}, "unknown ratio 'row'"),
        ({"kl": {"kind": "k4"}}, "unknown kl 'k4'.*k1, k1p, k2, k3, k3p"),
        ({"entropy": {"kind": "exact"}}, "unknown entropy 'exact'.*full, sampled"),
        ({"filter": {"kind": "resampel"}}, "did you mean 'resample'"),
        ({"aggregation": {"kind": "mean"}}, "unknown aggregation 'mean'"),
        ({"kl": {"kind": "k3", "aggregation": "mean"}}, r"kl\.aggregation.*'mean'"),
        ({"kl": {"kind": "k3", "coef": 0.1, "aggregation": 5}}, r"kl\.aggregation is 5; expected a name.*token_mean"),
        ({"kl": {"kind": "k3", "coef": 0.1, "aggregation": ["token_mean"]}}, r"kl\.aggregation is \['token_mean'\]"),
        ({"kl": {"kind": "k3"}}, "kl is 'k3', whose coef is 0 by default"),
        ({"entropy": {"kind": "full"}}, "entropy is 'full', whose coef is 0 by default"),
        ({"surrogate": {"kind": "cispo"}}, "no part 'surrogate'; its parts: advantage, scaling, ratio, clip"),
        ({"advantage": {"kind": "group_mean", "ddof": 1}}, "no option 'ddof'; it has: singleton"),
        ({"ratio": {"low": 0.1}}, "'token' has no option 'low'; it has none"),
        ({"clip": {"kind": "cispo", "dual": 3.0}}, "'cispo' has no option 'dual'; it has: low, high"),
        ({"clip": {"kind": "bgpo", "low": 0.1}}, "'bgpo' has no option 'low'"),
        ({"filter": {"low": 0.1}}, "'none' has no option 'low'"),
        ({"aggregation": {"length": 100}}, "'token_mean' has no option 'length'"),
        ({"kl": {"coef": 0.1}}, r"kl\.coef would do nothing; .*objective\.kl\.kind=none; .*set its kind: full, k1"),
        ({"entropy": {"coef": 0.1}}, "entropy is not part of this objective.*set its kind: full, sampled"),
        ({"clip": {"high": "wide"}}, r"clip\.high is 'wide'; expected float, at least 0"),
        ({"clip": {"high": True}}, r"clip\.high is True; expected float"),
        ({"advantage": {"ddof": 0.5}}, r"advantage\.ddof is 0\.5; expected int, one of 0, 1"),
    ],
)
def test_options_that_a_block_does_not_have_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        Objective("mine").override(changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip": PpoClip(low=1.5)}, r"clip\.low is 1\.5; must be in \[0, 1\]"),
        ({"clip": PpoClip(high=-0.1)}, r"clip\.high is -0\.1"),
        ({"clip": PpoClip(dual=1.0)}, r"clip\.dual is 1\.0; must be above 1"),
        ({"clip": GspoClip()}, "clips whole rows"),
        ({"clip": Cispo(), "ratio": SequenceFullRatio()}, "detaches the ratio"),
        ({"clip": PolicyGradient(), "ratio": SequenceRatio()}, "uses no ratio"),
        ({"ratio": SequenceFullRatio(), "advantage": Gae(), "value": ValueLoss()}, "varies within a row"),
        ({"ratio": SequenceProductRatio(), "advantage": WhitenedReturns()}, "varies within a row"),
        ({"kl": ExactKl(0.1, in_reward=True)}, "cannot be used in the reward"),
        ({"kl": K3StraightThrough(0.1, in_reward=True)}, "Use 'k3'"),
        ({"kl": K1(0.1, in_reward=True, aggregation=SequenceMean())}, "has no effect"),
        ({"kl": K1(-0.1)}, r"kl\.coef is -0\.1"),
        ({"aggregation": FixedLength()}, r"aggregation\.length is 0; must be at least 1"),
        ({"value": ValueLoss()}, "has no critic"),
        ({"advantage": Gae()}, "needs a critic, but there is no value loss"),
        ({"filter": DropGroups(low=0.9, high=0.1)}, "must be below"),
        ({"advantage": GroupMeanStd(ddof=2)}, r"advantage\.ddof is 2; allowed: 0, 1"),
        ({"advantage": GroupMeanStd(eps=-1.0)}, r"advantage\.eps is -1\.0"),
        ({"advantage": WhitenedReturns(gamma=1.1)}, r"advantage\.gamma is 1\.1"),
        ({"advantage": GroupMeanStd(singleton="drop")}, "singleton is 'drop'; allowed: zero, keep"),
        ({"advantage": WhitenedReturns(mask_carry="hop")}, "mask_carry is 'hop'"),
        ({"scaling": AdvantageScaling(clip=0.0)}, r"scaling\.clip is 0\.0; must be positive"),
        ({"scaling": AdvantageScaling(scale=-1.0)}, r"scaling\.scale is -1\.0"),
        ({"scaling": AdvantageScaling(scale=float("nan"))}, r"scaling\.scale is nan"),
        ({"scaling": AdvantageScaling(whiten="columns")}, r"scaling\.whiten is 'columns'"),
        ({"advantage": GroupMeanStd(eps=-1.0), "clip": PpoClip(low=2.0)}, r"- advantage\.eps.*- clip\.low"),
    ],
)
def test_contradictions_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"(?s)objective 'mine' cannot be used.*{message}"):
        Objective("mine", **changes).validate()


def test_overrides_change_numbers_and_exchange_blocks():
    changed = get("grpo").override(
        {"clip": {"high": 0.3, "dual": 3}, "kl": {"kind": "k2"}, "aggregation": {"kind": "token_mean"}}
    )
    assert changed.clip == PpoClip(0.2, 0.3, 3.0)
    assert changed.kl == K2(0.04)  # another kind keeps the numbers that both have
    assert changed.aggregation == TokenMean()
    assert get("grpo").override({"kl": {"coef": 0}}).kl is None
    assert get("dapo").override({"kl": {"coef": 0.0}}).kl is None
    assert get("grpo").override({"kl": {"kind": "none"}}).kl is None
    own = get("grpo").override({"kl": {"aggregation": {"kind": "fixed_length", "length": 7}}})
    assert own.kl.aggregation == FixedLength(7)
    assert own.fixed_length == 7
    assert own.with_fixed_length(9).fixed_length == 9


@pytest.mark.parametrize("part", BLOCKS)
def test_every_block_states_its_formula_and_is_found_by_its_kind(part):
    for kind, block in all_kinds(part).items():
        made = changed_block(None, {"kind": kind} | NEEDED.get(kind, {}), part)
        assert type(made) is block
        assert list(made.problems(part)) == []
        assert made.formula() or made in (KeepAll(), AdvantageScaling(), Epochs())


NEEDED = {"fixed_length": {"length": 5}}


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
    changed = get("dapo").replace(
        filter=ResampleGroups(low=0.01, high=0.99), kl=K3(0.5, aggregation=SequenceMean()), entropy=FullEntropy(0.003)
    )
    text = changed.describe()
    for part in ("between 0.01 and 0.99", "within +-10", "KL averages: mean over the rows", "(-0.003) * mean H_it"):
        assert part in text


def test_description_shows_limits_and_factors_of_advantages():
    mine = Objective(
        "mine", GroupMeanGlobalStd(eps=1e-4), Bgpo(), scaling=AdvantageScaling(clip=5.0, scale=0.2), filter=DropGroups()
    )
    text = mine.describe()
    for part in (
        "(R_i - mean_g R) / (std of all R + 0.0001)",
        "; then limited to +-5; then times 0.2",
        "[-A_it (1 + log r_it) where A_it >= 0, -A_it r_it elsewhere]",
    ):
        assert part in text
    assert "then" not in mine.replace(scaling=AdvantageScaling()).describe()


def test_an_invalid_objective_has_no_description():
    with pytest.raises(ValueError, match="cannot be used"):
        Objective("mine", value=ValueLoss()).describe()


def test_parts_name_the_blocks_and_their_own_numbers():
    text = get("dapo").parts()
    assert text == "group_mean_std, ratio token, ppo_clip (high 0.28), token_mean, groups: resample"
