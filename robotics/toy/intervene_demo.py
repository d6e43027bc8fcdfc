"""The intervention demo: a weak clone, corrected by a scripted person, becomes a policy that hardly needs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.config import load_run
from mmrl.hub.video_writing import write_mp4
from mmrl.report.page import write_report
from mmrl.runs.records import read_jsonl
from mmrl.training.run import finish_run
from robotics.data import LeRobotReader
from robotics.episodes.collect import replay_episode
from robotics.interventions.hg_dagger import round_metrics
from robotics.interventions.record import INTERVENTION, read_attempts
from robotics.scenes.videos import Caption, write_caption
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.opening import open_video_sim
from robotics.sim.rendering import Outcome

CONFIGS = Path("configs/robotics")
SPLIT = "held_out"
FILM_HEIGHT = 360
FILMED = 2
"""Episodes of the first round, and of the last one, that are filmed."""
ORANGE = (255, 140, 0)
EDGE = 6
"""Pixels of the frame around a picture while the person has control."""


def run(output_dir: Path, seed: int = 0) -> list[str]:
    """Clone a few demonstrations, correct the clone with HG-DAgger, and film it; finished stages are kept.

    Args:
        output_dir: folder for demonstrations, the two runs and the film.
        seed: seed of both stages; the demonstrations do not depend on it.

    Returns:
        Lines to print: held-out success over the training steps without and with the person, interventions per episode
        of each round, and the paths of film and report.

    Raises:
        UserError: no renderer, or a configuration is missing.
        RunError: a stage failed.
    """
    common = [f"seed={seed}", f"demonstrations.path={output_dir}/demonstrations"]
    clone = finish_run(CONFIGS / "demo_weak_clone.yaml", output_dir / "clone", common)
    corrected = finish_run(CONFIGS / "demo_hg_dagger.yaml", output_dir / "hg_dagger", common)
    film = write_film(corrected, output_dir / "interventions.mp4")
    report = write_report(corrected, chain=[clone])
    return [
        *_success_lines(clone, corrected),
        *_round_lines(corrected),
        f"film of the first and the last episodes, with an orange frame while the person has control: {film}",
        f"report: {report}",
    ]


def _curve(run_dir: Path) -> dict[int, dict[str, Any]]:
    rows = read_jsonl(run_dir / "evaluations.jsonl")
    return {row["step"]: row for row in rows if row["split"] == SPLIT}


def _success_lines(clone: Path, corrected: Path) -> list[str]:
    alone, helped = _curve(clone), _curve(corrected)
    count = next(iter(helped.values()))["n"]
    lines = [f"success on {int(count)} held-out initial states, greedy (95% interval), by training step"]
    lines.append(f"  {'step':>6}  {'demonstrations alone':<24}  with the person's corrections")
    return lines + [f"  {step:>6}  {_share(alone.get(step)):<24}  {_share(row)}" for step, row in helped.items()]


def _share(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    value, low, high = (100 * row[f"success/greedy{end}"] for end in ("", "/low", "/high"))
    return f"{value:5.1f}% ({low:4.1f} to {high:5.1f})"


def _round_lines(run_dir: Path) -> list[str]:
    size = load_run(run_dir / "config.yaml", [])[1].interventions.episodes
    lines = ["interventions of the scripted person, by round"]
    attempts = read_attempts(run_dir / "interventions")
    for number, start in enumerate(range(0, len(attempts), size), 1):
        found = round_metrics(attempts[start : start + size])
        lines.append(
            f"  round {number:>2}: {found['intervention/per_episode']:4.2f} per episode, "
            f"{100 * found['intervention/rate']:4.1f}% of the control steps; "
            f"{100 * found['intervention/success_alone']:5.1f}% of the episodes succeeded without any"
        )
    return lines


def write_film(run_dir: Path, path: Path) -> Path:
    """Film the first and the last watched episodes of a run, with a frame while the overseer has control."""
    if path.exists():
        return path
    config = load_run(run_dir / "config.yaml", [])[1]
    lines = [line for line in read_attempts(run_dir / "interventions") if line["episode_index"] is not None]
    reader = LeRobotReader(run_dir / "interventions")
    sim = open_video_sim(dataclasses.replace(config.sim), FILM_HEIGHT)
    frames: list[np.ndarray] = []
    try:
        for line in [*lines[:FILMED], *lines[-FILMED:]]:
            episode = reader.episode(line["episode_index"])
            spec = EpisodeSpec(line["task"], episode.task, line["layout"], line["split"])
            seen, success = replay_episode(sim, spec, episode.action)
            frames += _marked(
                seen, episode.extra[INTERVENTION].ravel().tolist(), f"round {_round(line, config)}", success, reader.fps
            )
    finally:
        sim.close()
    return write_mp4(path, frames, reader.fps)


def _round(line: dict[str, Any], config: Any) -> int:
    return 1 + int(line["attempt"]) // int(config.interventions.episodes)


def _marked(frames: np.ndarray, owners: Sequence[bool], text: str, success: bool, fps: float) -> list[np.ndarray]:
    marked = []
    for number, frame in enumerate(frames):
        picture = frame.copy()
        # a frame shows what the action before it has done
        if 0 < number <= len(owners) and owners[number - 1]:
            for side in (np.s_[:EDGE], np.s_[-EDGE:], np.s_[:, :EDGE], np.s_[:, -EDGE:]):
                picture[side] = ORANGE
        last = number == len(frames) - 1
        ending: Outcome = "success" if success else "failure"
        picture = write_caption(picture, Caption(text, number / fps, ending if last else ""))
        # the end is held for a second
        marked += [picture] * (round(fps) if last else 1)
    return marked
