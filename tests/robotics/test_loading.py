"""Policies from their configuration: new ones that fit a simulator, saved ones, and user-defined ones."""

import pytest
import torch
from torch import nn

from mmrl.errors import UserError
from mmrl.fields import check_config
from robotics.episodes.collect import ActingSettings, run_episodes
from robotics.policies.flow import FlowActionPolicy
from robotics.policies.gaussian import GaussianActionPolicy
from robotics.policies.module import ModuleAdapter
from robotics.policies.policy_loading import ActionPolicyConfig, check_fit, load_action_policy
from robotics.policies.small import SmallVlaPolicy
from robotics.sim.episodes import EpisodeSpec
from tests.robotics.line_demos import BLIND, ENCODER
from tests.robotics.line_policies import GaussianWalker
from tests.robotics.line_sim import LineSim
from tests.robotics.tiny_models import save_tiny_vlm

FLOW = {"steps": 2, "hidden": 16, "blocks": 1}
WALKER = "tests.robotics.line_policies:make_walker"


class BlindSim(LineSim):
    image_size = None


class WideSim(LineSim):
    image_size = (64, 32)
    state_size = 3


class TwoArms(LineSim):
    action_size = 2


def load(kind="small", sim=None, seed=0, path="", chunk=3, **options):
    config = ActionPolicyConfig(path=str(path), kind=kind, chunk=chunk, options=options)
    check_config(config, "model")
    return load_action_policy(config, sim or LineSim(), seed)


def act(policy, seed=0, greedy=True):
    episodes = [EpisodeSpec(task, f"go {task}", layout) for layout in range(2) for task in ("right", "left")]
    generator = torch.Generator().manual_seed(seed)
    found = run_episodes(policy, LineSim(), episodes, ActingSettings(), generator, greedy=greedy)
    return found.actions


def same_weights(one, other):
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    ("kind", "options", "made"),
    [
        ("small", {"bins": 8}, SmallVlaPolicy),
        ("gaussian", {"std_per": "state"}, GaussianActionPolicy),
        ("flow", FLOW, FlowActionPolicy),
    ],
)
def test_new_policies_fit_the_simulator(kind, options, made):
    policy = load(kind, encoder=ENCODER, **options)
    assert type(policy) is made
    assert (policy.chunk, policy.action_size) == (3, 1)
    assert policy.config.encoder.image_size == (32, 32)
    assert policy.config.encoder.state_size == 2
    check_fit(policy, LineSim())
    assert all(actions.shape[1] == 1 for actions in act(policy))


def test_sizes_and_options_reach_the_policy():
    policy = load(sim=WideSim(), chunk=5, bins=12, label_spread=0.2, encoder={**ENCODER, "layers": 2})
    assert policy.config.encoder.image_size == (64, 32)
    assert policy.config.encoder.state_size == 3
    assert (policy.chunk, policy.config.bins, policy.config.label_spread) == (5, 12, 0.2)
    assert len(policy.encoder.blocks) == 2
    blind = load(sim=BlindSim(), encoder=ENCODER)
    assert blind.config.encoder.image_size is None
    assert load(encoder=BLIND).encoder.stem is None


def test_words_are_those_of_the_simulator():
    known = load(encoder=BLIND).vocabulary
    codes = known.encode(["go right", "go left", "go up"], 4)
    assert codes[0].tolist() != codes[1].tolist()
    assert codes[2, 1] not in codes[:2]


def test_weights_follow_from_the_seed():
    assert same_weights(load(encoder=BLIND, seed=3), load(encoder=BLIND, seed=3))
    assert not same_weights(load(encoder=BLIND, seed=3), load(encoder=BLIND, seed=4))


@pytest.mark.parametrize(("kind", "options"), [("small", {"bins": 8}), ("gaussian", {"std": 0.3}), ("flow", FLOW)])
def test_a_saved_folder_is_the_same_policy(tmp_path, kind, options):
    policy = load(kind, encoder=ENCODER, **options)
    policy.save_pretrained(tmp_path / "saved")
    again = load(path=tmp_path / "saved", seed=7, chunk=1)  # what it is says the folder
    assert type(again) is type(policy)
    assert again.chunk == 3
    assert same_weights(again, policy)
    for one, other in zip(act(policy, greedy=False), act(again, greedy=False), strict=True):
        assert (one == other).all()


def test_settings_of_a_saved_vlm_can_be_changed(tmp_path):
    folder = save_tiny_vlm(tmp_path / "tiny")
    vlm = {"path": str(folder), "dtype": "bfloat16"}
    load("vlm", chunk=2, vlm=vlm, bins=16).save_pretrained(tmp_path / "saved")
    assert next(load(path=tmp_path / "saved").vlm.network.parameters()).dtype == torch.bfloat16
    again = load(path=tmp_path / "saved", vlm={"dtype": "float32", "lora": {"enabled": True, "rank": 2}})
    assert next(again.vlm.network.parameters()).dtype == torch.float32
    assert again.vlm.has_adapter
    assert again.vlm.config.lora.rank == 2
    with pytest.raises(UserError, match=r"model\.options\.vlm: .*rang"):
        load(path=tmp_path / "saved", vlm={"rang": 2})
    load(encoder=BLIND).save_pretrained(tmp_path / "small")
    with pytest.raises(UserError, match=r"vlm is given, but .*small contains a policy of kind 'small'"):
        load(path=tmp_path / "small", vlm={"dtype": "float32"})


def test_a_vlm_gets_an_action_head(tmp_path):
    folder = save_tiny_vlm(tmp_path / "tiny")
    policy = load("vlm", chunk=2, vlm={"path": str(folder)}, bins=16, state_size=2)
    assert (policy.chunk, policy.action_size, policy.decisions) == (2, 1, 2)
    assert policy.vlm.config.path == str(folder)
    assert policy.extra.project.in_features == 2
    policy.save_pretrained(tmp_path / "saved")
    again = load(path=tmp_path / "saved")
    for one, other in zip(act(policy), act(again), strict=True):
        assert (one == other).all()


@pytest.mark.parametrize(
    ("vlm", "message"),
    [
        ({}, "model.options.vlm: .*path"),
        ({"paht": "x"}, "model.options.vlm: .*paht"),
        ({"lora": {"rank": "many"}}, "model.options.vlm: .*many"),
    ],
)
def test_settings_of_a_vlm_are_checked_like_a_file(vlm, message):
    with pytest.raises(UserError, match=message):
        load("vlm", vlm=vlm)


# ---- a user's own ----


def make_policy(sizes=(1, 3)):
    return ModuleAdapter(GaussianWalker(), sizes[0], 1)


def make_stepwise():
    module = GaussianWalker()
    module.decisions = 3
    return module


def make_nothing():
    return {"a": "dict"}


def make_mute():
    return nn.Linear(2, 1)


def test_a_users_module_is_wrapped():
    policy = load(WALKER, chunk=1, bias=0.25)
    assert isinstance(policy, ModuleAdapter)
    assert (policy.chunk, policy.action_size, policy.decisions) == (1, 1, 1)
    assert float(policy.module.net[-1].bias.detach()) == 0.25
    assert load(f"{__name__}:make_stepwise").decisions == 3
    assert isinstance(load(f"{__name__}:make_policy").module, GaussianWalker)


def test_a_users_module_reads_its_weights_from_the_folder(tmp_path):
    load(WALKER, chunk=1, bias=0.75).save_pretrained(tmp_path / "saved")
    again = load(WALKER, chunk=1, bias=0.0, path=tmp_path / "saved")
    assert float(again.module.net[-1].bias.detach()) == 0.75


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (f"{__name__}:make_nothing", "returned a dict; expected an nn.Module"),
        (f"{__name__}:make_mute", "Linear has no method act and no method log_probs"),
        (f"{__name__}:make_nobody", "make_nobody"),
        ("no.such.module:make", "no.such.module"),
    ],
)
def test_what_is_no_policy_is_named(kind, message):
    with pytest.raises(UserError, match=message):
        load(kind)


# ---- mistakes ----


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("small", {"bin": 8}, "model.options has bin; allowed: bins, encoder, label_smoothing"),
        ("gaussian", {"bins": 8}, "model.options has bins; allowed: cloning, encoder, max_std, min_std, std, std_per"),
        ("gaussian", {"std": 0.01}, r"std is 0\.01; must be above min_std=0\.05 and below max_std=1"),
        ("flow", {"bins": 8}, "model.options has bins; allowed: blocks, encoder, hidden"),
        ("vlm", {"bin": 8}, "model.options has bin; allowed: bins, first_id"),
        (
            "small",
            {"encoder": {"depth": 2}},
            "model.options.encoder has depth; allowed: channels, condition_queries, heads",
        ),
        ("small", {"chunk": 2}, "model.options has chunk; allowed: bins"),
        ("small", {"encoder": {**BLIND, "width": 20}}, "width=20 must be a multiple"),
        ("small", {"encoder": {**BLIND, "state_size": -1}}, "state_size is -1; must be at least 1"),
        ("small", {"encoder": {**BLIND, "words": -1}}, "words is -1; must be at least 1"),
        (f"{__name__}:make_nothing", {"width": 3}, r"make_nothing' does not take the options {'width': 3}.*'width'"),
    ],
)
def test_unknown_options_list_allowed_ones(kind, options, message):
    config = ActionPolicyConfig(kind=kind, options=options)
    with pytest.raises(UserError, match=message):
        load_action_policy(config, LineSim(), 0)


@pytest.mark.parametrize(
    ("sim", "message"),
    [
        (TwoArms(), "actions have 1 entries, but the simulator's have 2"),
        (WideSim(), r"images of \(32, 32\) pixels, but the simulator renders \(64, 32\)"),
        (BlindSim(), r"images of \(32, 32\) pixels, but the simulator renders None"),
    ],
)
def test_a_policy_of_another_simulator_does_not_fit(sim, message):
    with pytest.raises(UserError, match=message):
        check_fit(load(encoder=ENCODER), sim)


def test_a_policy_of_other_states_does_not_fit():
    policy = load(encoder=BLIND)
    policy.config.encoder.state_size = 9
    with pytest.raises(UserError, match="reads 9 state entries, but the simulator has 2"):
        check_fit(policy, LineSim())
    check_fit(load(WALKER, chunk=1), WideSim())  # what a user's module looks at is its own affair


def test_what_is_not_read_does_not_have_to_fit():
    check_fit(load(encoder=BLIND), BlindSim())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "huge"}, "model.kind is 'huge'; allowed: small, gaussian, squashed, residual, steered, flow, vlm"),
        ({"chunk": 0}, "model.chunk is 0"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        check_config(ActionPolicyConfig(**changes), "model")


def test_a_folder_that_is_not_a_policy_is_named(tmp_path):
    with pytest.raises(UserError, match="is not a saved policy"):
        load(path=tmp_path)
