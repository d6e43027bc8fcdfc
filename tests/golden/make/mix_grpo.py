"""Places of MixGRPO's window by its public code, and by UniRL's scheduler, which needs no counter."""

from types import SimpleNamespace
from typing import Any

from tests.golden.make.peers import Clone, Made

COMMITS = ("e5cdd6a427778d8c8b2e7a48ce16972141adbe7c", "1a7b501e8fe8517b432a130220d2ff462f9b5afa")
STATES = "fastvideo/utils/grpo_states.py"
SCHEDULER = "unirl/utils/scheduler_utils.py"
CASES = [
    {"schedule": "progressive", "size": 4, "high": 23, "every": 25, "stride": 1},
    {"schedule": "progressive", "size": 4, "high": 23, "every": 3, "stride": 4},
    {"schedule": "decay", "size": 4, "high": 23, "every": 25, "stride": 1},
    {"schedule": "decay", "size": 2, "high": 18, "every": 3, "stride": 2},
    {"schedule": "exp_decay", "size": 4, "high": 23, "every": 25, "stride": 1},
]
ROUNDS = [
    {"size": 4, "steps": 10, "low": 0, "every": 3, "stride": 3, "restart": True},
    {"size": 3, "steps": 12, "low": 2, "every": 2, "stride": 2, "restart": True},
    {"size": 4, "steps": 10, "low": 1, "every": 2, "stride": 4, "restart": False},
]
ITERATIONS = 60


def make(*paths: str) -> Made:
    mix, unirl = (
        Clone(path, f"Tencent-Hunyuan/{name}", commit)
        for path, name, commit in zip(paths, ("MixGRPO", "UniRL"), COMMITS, strict=True)
    )
    inputs = {"first_rounds": CASES, "rounds": ROUNDS}
    peers = [
        {"program": mix.name, "calls": [f"{STATES}:GRPOTrainingStates"], "relative": 1e-12}
        | {"starts": [first_round(mix, case) for case in CASES]},
        {"program": unirl.name, "calls": [f"{SCHEDULER}:WindowScheduler"], "relative": 1e-12}
        | {"windows": [windows(unirl, case) for case in ROUNDS]},
    ]
    return "MixGRPO, arXiv 2507.21802", inputs, peers, mix, unirl


def first_round(clone: Clone, case: dict[str, Any]) -> list[int]:
    """First step of the window in each iteration, until it no longer fits below `high`."""
    states = clone.function(STATES, "GRPOTrainingStates")()
    given = {"iters_per_group": case["every"], "group_size": case["size"], "max_timesteps": case["high"]}
    options = {"prog_overlap": True, "prog_overlap_step": case["stride"], "sample_strategy": case["schedule"]}
    states.set_params(given | options)
    states.__post_init__()
    found = []
    while len(steps := states.get_current_timesteps()) == case["size"]:
        found.append(steps[0])
        states.update_iteration()
    return found


def windows(clone: Clone, case: dict[str, Any]) -> list[list[int]]:
    """Steps of the window in each iteration."""

    class Base:
        def __init__(self, num_timesteps: int) -> None:
            self.num_timesteps = num_timesteps

    names = dict.fromkeys(("Set", "Optional", "Dict", "Type"), dict)
    kind = clone.function(SCHEDULER, "WindowScheduler", TimestepScheduler=Base, **names)
    config = SimpleNamespace(
        strategy="progressive",
        window_size=case["size"],
        overlap_size=case["size"] - case["stride"],
        iters_per_window=case["every"],
        init_timestep=case["low"],
        roll_back=case["restart"],
    )
    scheduler = kind(case["steps"], config)
    return [sorted(scheduler.get_sde_indices(step)) for step in range(ITERATIONS)]
