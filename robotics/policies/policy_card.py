"""Facts about an exported policy for its card: robot, cameras, state, actions, rate and initial states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.files import read_json_object, write_atomically
from mmrl.hub.cards import CARD, card_text, fenced, plain, table
from mmrl.runs.export import Exported
from mmrl.runs.records import read_jsonl
from mmrl.workers.loading import GIVEN
from robotics.policies.base.action_policy import ActionPolicy
from robotics.sim.interface import RobotInterface, read_sizes

SIMULATED = "The policy was trained and evaluated only in simulation; it has not been run on a real robot."
TABLETOP_ACTION = "dx, dy, dz, dyaw and gripper (above 0 closes), each in -1..1"
NORMALISED = "normalised; `policy.statistics` converts them to the units of the demonstrations"
INSIDE = "lerobot"
"""Subfolder of an export that lerobot itself can load."""


def users_policy(config: Any) -> Exported:
    """Facts about the weights of a user-defined module."""
    module, _, name = config.model.kind.partition(":")
    maker, load = f"{config.model.kind}(...)", f"from {module} import {name}\n\nmake = {name}"
    if module == GIVEN:  # a loaded module, whose class no import finds
        maker = "ModuleAdapter(your_module, action_size, chunk)"
        load = "from robotics import ModuleAdapter\n\nmake = ModuleAdapter  # of a module of the class that was trained"
    return Exported(
        f"{maker}.load_weights",
        f"{load}\n# then make(...).load_weights(folder)",
        task="robotics",
        facts=_facts(config, {}),
        limits=(SIMULATED,),
    )


def describe_policy(config: Any, policy: ActionPolicy, run_dir: Path, output: Path) -> Exported:
    """Facts about a policy that was exported to a folder; a LeRobot policy also gets a card for lerobot."""
    simulator = _simulator(run_dir)
    known = policy.interface or RobotInterface()
    facts = {
        **_facts(config, simulator),
        **({"entries of the state": ", ".join(known.state)} if known.state else {}),
        **({"control rate": f"{known.control_hz:g} Hz"} if known.control_hz else {}),
        "actions": f"chunks of {policy.chunk} control steps with {policy.action_size} entries each"
        + (f": {TABLETOP_ACTION}" if config.sim.kind == "tabletop" else ""),
        "units of actions": _units(config, policy),
        "executed steps per chunk": str(config.acting.n_action_steps or policy.chunk),
    }
    use = _acting(config, policy, run_dir) if policy.past == 0 else ""
    load = "from robotics import open_policy\n\npolicy = open_policy(folder)"
    found = Exported("robotics.open_policy", load, use, task="robotics", facts=facts, limits=(SIMULATED,))
    if (output / INSIDE).is_dir():
        _write_lerobot_card(output / INSIDE, facts)
    return found


def _units(config: Any, policy: ActionPolicy) -> str:
    if config.acting.scale != "none":
        return NORMALISED
    bounds = policy.action_bounds
    return (
        f"-1..1, which correspond to {bounds} in the environment's own units; `policy.action_bounds` converts them"
        if bounds
        else ""
    )


def _simulator(run_dir: Path) -> dict[str, Any]:
    """The simulator as the run's last evaluation described it; empty without one."""
    for path in sorted((run_dir / "episodes").glob("*.protocol.json"), reverse=True):
        try:
            found = read_json_object(path).get("simulator")
        except UserError:
            continue
        if isinstance(found, dict):
            return found
    return {}


def rendered_size(config: Any, run_dir: Path) -> tuple[int, int] | None:
    """(H, W) of a run's images; None without images.

    An environment may keep the size of its camera, which only an evaluation says.
    """
    side = config.sim.image_size
    height, width = _simulator(run_dir).get("image_size") or (side, side)
    return (int(height), int(width)) if side else None


def _facts(config: Any, simulator: dict[str, Any]) -> dict[str, str]:
    sim = config.sim
    names = [str(simulator.get("camera") or sim.camera or "the simulator's own"), *sim.views]
    size = " x ".join(map(str, simulator.get("image_size") or [sim.image_size] * 2))
    horizons = simulator.get("tasks")
    horizon = sim.horizon or simulator.get("horizon")
    if isinstance(horizons, dict):
        horizon = ", ".join(f"{task} {steps}" for task, steps in horizons.items())
    splits = {"training": getattr(config, "data", None), **config.eval_data}
    chosen = [
        f"{name}: layouts {data.first} to {data.first + data.layouts - 1} of the split {data.split}"
        for name, data in splits.items()
        if data is not None and hasattr(data, "layouts")
    ]
    found = {
        "simulator": " ".join(filter(None, [sim.kind, sim.env, ", ".join(sim.tasks)])),
        "robot": str(simulator.get("arm") or (sim.arm if sim.kind == "tabletop" else "")),
        "cameras": f"{', '.join(names)}; {size} pixels, RGB" if sim.image_size else "none",
        "state": sim.state if sim.kind == "tabletop" else "",
        "control rate": f"{simulator['control_hz']:g} Hz" if simulator.get("control_hz") else "",
        "horizon in control steps": str(horizon or ""),
        "initial states": "; ".join(chosen),
    }
    return {name: text for name, text in found.items() if text}


def _acting(config: Any, policy: ActionPolicy, run_dir: Path) -> str:
    """Lines that choose a chunk of actions for black images and a state of zeros."""
    settings = read_sizes(policy)
    height, width = getattr(settings, "image_size", rendered_size(config, run_dir)) or (0, 0)
    state = getattr(settings, "state_size", None)
    episodes = (row for path in (run_dir / "episodes").glob("*.jsonl") for row in read_jsonl(path))
    said = next((str(row["instruction"]) for row in episodes if row.get("instruction")), "pick up the cube")
    views = policy.views if policy.views is not None else len(config.sim.views)
    parts = [
        f"    images=torch.zeros(1, {height}, {width}, 3, dtype=torch.uint8)," if height else "    images=None,",
        f"    state=torch.zeros(1, {state})," if state else "    state=None,",
        f"    instructions=({said!r},),",
        *([f"    views=torch.zeros(1, {views}, {height}, {width}, 3, dtype=torch.uint8),"] if views else []),
    ]
    lines = ["", "import torch", "from robotics import PolicyInputs", "", "observation = PolicyInputs(", *parts, ")"]
    lines += ["choice = policy.act(observation, torch.Generator().manual_seed(0), greedy=True)"]
    return "\n".join([*lines, "print(choice.actions.shape)  # (1, control steps, entries of an action)"])


def _write_lerobot_card(folder: Path, facts: Mapping[str, str]) -> None:
    from huggingface_hub import ModelCardData

    kind = str(read_json_object(folder / "config.json").get("type", "policy"))
    load = "from lerobot.policies.factory import get_policy_class"
    head = ModelCardData(library_name="lerobot", pipeline_tag="robotics", tags=["robotics", "lerobot", "mmrl", kind])
    lines = [
        f"# {kind} policy",
        "",
        "A policy in the format of [LeRobot](https://github.com/huggingface/lerobot), trained with mmrl; see the "
        "card in the parent folder for its results.",
        "",
        *fenced(f'{load}\n\npolicy = get_policy_class({kind!r}).from_pretrained(".")  # this folder', "python"),
        *table(["", ""], [[name, plain(text)] for name, text in facts.items()]),
        SIMULATED,
    ]
    write_atomically(folder / CARD, card_text(head, lines))
