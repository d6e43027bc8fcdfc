"""Seconds of a rollout whose tools are slow, with all episodes in lock-step and in cohorts.

    python -m benchmarks.agents.slow_tools [--rounds 2] [--case 'one call in ten takes 2 s'] [--out FILE]

A tiny model plays episodes of six turns in 16 environments that sleep in every turn, each way with the same seconds of
sleep. The ways take turns in one process, with the environments and the model of all of them; the first round of a way
does not count. `over_longest` is the wall time over that of the longest episode by itself. TRL's GRPOTrainer, if
installed, sleeps in a tool.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.agents.trl_tools import ToolLoop
from benchmarks.report import print_each
from mmrl.agents.environments.action_formats import SAY
from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.environments.environment import Action, ActionConfig, ParsedAnswer
from mmrl.config import load_run
from mmrl.training.processes import seed_everything

TURNS, WORKERS = 6, 16
CASES = {"0.1 to 2 s at random": 16, "one call in ten takes 2 s": 64}
"""Episodes of a case."""
WAYS: dict[str, dict[str, Any]] = {
    "in lock-step": {"cohort": None},
    "cohorts of 4": {"cohort": 4},
    "each by itself": {"cohort": 1},
    "dynamic": {"cohort": None, "batching": "dynamic"},
}
"""Options of `episode`."""
PEER = "TRL"


def sleep_s(case: str, seed: int, turn: int) -> float:
    """Seconds of a tool call; the same for every way."""
    generator = random.Random(f"{case} {seed} {turn}")
    if case == "0.1 to 2 s at random":
        return generator.uniform(0.1, 2.0)
    return 2.0 if generator.random() < 0.1 else 0.1


class SlowTools:
    """Sleeps in every turn; the last one ends the episode."""

    def reset(self, task: dict[str, Any], seed: int) -> str:
        """Begin an episode."""
        self._seconds, self._turn = task["seconds"], 0
        return "Call a tool."

    def step(self, action: Any) -> tuple[str, float, bool]:
        """Observation, reward, and whether the episode is over."""
        time.sleep(self._seconds[self._turn])
        self._turn += 1
        return f"turn {self._turn}", 1.0, self._turn == len(self._seconds)

    def close(self) -> None:
        """Nothing to close."""


def call(self: ActionConfig, text: str, cut: bool = False, tools: Any = None) -> ParsedAnswer:
    """A tool call for every answer; those of an untrained model seldom end before the limit."""
    return ParsedAnswer((Action(SAY, {"text": text}, text),))


def settings_for(folder: Path) -> list[str]:
    """Settings of the run."""
    return [
        f"output_dir={folder}/run",
        f"model.path={folder}/model",
        "model.build=mmrl.agents.toy.build:build_model",
        # so small that tools take most of the time, as with a large model on a GPU
        "model.build_options={family: qwen3, hidden: 32, layers: 1, max_positions: 16384}",
        "environment.factory=benchmarks.agents.slow_tools:SlowTools",
        f"environment.workers={WORKERS}",
        "actions.format=text",
        "data.seeds=400",
        "sampler.max_new_tokens=1",
    ]


def measure(recipe: Any, case: str, *, cohort: int | None, batching: str = "cohorts") -> dict[str, float]:
    """Wall seconds of a rollout, and the fraction of them in which nothing was sampled."""
    recipe.config.episode.cohort = cohort
    # the environments are in other processes
    seconds = [[sleep_s(case, seed, turn) for turn in range(TURNS)] for seed in range(CASES[case])]
    tasks = [AgentTask(f"tools/{seed}", {"seconds": each}, seed=seed) for seed, each in enumerate(seconds)]
    seen, began = Counter[str](), time.perf_counter()
    dynamic = batching == "dynamic"
    episodes = recipe.run_episodes(recipe.policy, tasks, range(len(tasks)), seen=seen, dynamic=dynamic)
    wall_s = time.perf_counter() - began
    if not all(episode.total == TURNS for episode in episodes):
        raise RuntimeError(f"not all episodes took {TURNS} turns: {Counter(e.ending for e in episodes)}")
    return {"wall_s": wall_s, "idle": seen["idle_s"] / seen["rollout_s"]}


def compare(case: str, rounds: int) -> dict[str, Any]:
    """Seconds of a rollout with each method, and the speed-up over lock-step."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "agents.yaml"
        path.write_text("recipe: agent\n", encoding="utf-8")
        entry, config = load_run(path, settings_for(Path(name)))
        seed_everything(config.seed)
        recipe = entry.load_recipe_class()(config)
        with contextlib.closing(recipe), patch.object(ActionConfig, "parse", call):
            peer = ToolLoop(Path(name) / "model", TURNS, sleep_s) if find_spec("trl") else None
            found = []
            # once more, to warm up
            for _ in range(rounds + 1):
                found.append({way: measure(recipe, case, **options) for way, options in WAYS.items()})
                if peer is not None:
                    found[-1][PEER] = {"wall_s": peer.seconds(case, CASES[case])}
            del found[0]
    longest = max(sum(sleep_s(case, seed, turn) for turn in range(TURNS)) for seed in range(CASES[case]))
    ways = found[0]
    medians = {way: {key: statistics.median(one[way][key] for one in found) for key in ways[way]} for way in ways}
    faster = {
        way: statistics.median(one["in lock-step"]["wall_s"] / one[way]["wall_s"] for one in found) for way in ways
    }
    return {
        way: values | {"over_longest": values["wall_s"] / longest, "faster": faster[way]}
        for way, values in medians.items()
    }


if __name__ == "__main__":
    print_each(compare, CASES, rounds=2)
