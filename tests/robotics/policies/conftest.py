from functools import partial

import pytest

from robotics.policies.base.action_policy import ActionPolicy
from tests.robotics.policies.builders import (
    PLACES,
    TEXTS,
    S,
    make_adapter,
    make_flow,
    make_gaussian,
    make_small,
    make_vlm,
)

BUILDERS = {
    "small_step": partial(make_small, "step"),
    "small_token": partial(make_small, "token"),
    "gaussian_action": partial(make_gaussian, "action"),
    "gaussian_state": partial(make_gaussian, "state"),
    "flow": make_flow,
    "flow_x0": partial(make_flow, parameterisation="x0", encoder=PLACES),
    "vlm_zero": partial(make_vlm, placeholders="zero"),
    "vlm_learned": partial(make_vlm, placeholders="learned", state_size=S),
    "adapter": make_adapter,
}


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    pytest.importorskip("transformers", reason="needs pip install 'mmrl-suite[vlm]'")
    from mmrl.vlm.toy.tiny import build_tiny_vlm

    folder = tmp_path_factory.mktemp("vla") / "tiny"
    return build_tiny_vlm(folder, corpus=TEXTS, initializer_range=0.15, max_positions=256)


@pytest.fixture(scope="session")
def builders(tiny_folder):
    """Builds a new policy by kind; the vision-language models are those of one folder."""
    return {kind: partial(build, tiny_folder) if "vlm" in kind else build for kind, build in BUILDERS.items()}


@pytest.fixture(scope="session")
def policies(builders):
    """One policy of each kind; tests that change weights build their own."""
    return {kind: build() for kind, build in builders.items()}


@pytest.fixture(params=BUILDERS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def policy(kind, policies) -> ActionPolicy:
    return policies[kind]
