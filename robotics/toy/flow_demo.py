"""Demo of 3D flow: clips without robot actions, a world model, and an arm never seen in training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmrl.config import load_run
from mmrl.training.run import evaluate, finish_run, read_result
from robotics.flow3d.closed_loop.flow_episodes import FlowEpisodesConfig, list_episodes

CONFIGS = Path("configs/robotics")
FAMILIES = {"place": "place on a pad", "pour": "pour", "insert": "insert", "drawer": "open a drawer"}


def run(output_dir: Path, seed: int = 0) -> list[str]:
    """Render clips, train a world model, and act with an arm that appears in no clip; finished parts are kept."""
    seeded = f"seed={seed}"
    clips = [f"{key}.path={output_dir}/clips" for key in ("data", "eval_data.held_out")]
    model = finish_run(CONFIGS / "flow3d_traj_dit.yaml", output_dir / "world_model", [*clips, seeded])
    folder = output_dir / "closed_loop"
    entry, config = load_run(CONFIGS / "demo_flow_eval.yaml", [seeded, f"model.path={model}", f"output_dir={folder}"])
    found = _finished(folder) or evaluate(entry, config)
    (split, episodes), *_ = config.eval_data.items()
    videos = sorted((folder / "videos").glob("*.mp4"))
    return [
        *_flow_lines(read_result(model)["last_evaluation"]["held_out"]),
        *_success_lines(found, split, episodes),
        f"videos: {folder / 'videos'} ({len(videos)} files)",
        f"reports: {model / 'report.html'} and {folder / 'report.html'}",
    ]


def _finished(folder: Path) -> dict[str, float]:
    """Metrics of a finished evaluation; empty otherwise."""
    rows = folder / "evaluations.jsonl"
    if not (folder / "report.html").is_file() or not rows.is_file():
        return {}
    last = json.loads(rows.read_text(encoding="utf-8").splitlines()[-1])
    return {f"{last['split']}/{name}": value for name, value in last.items() if isinstance(value, int | float)}


def _flow_lines(found: dict[str, Any]) -> list[str]:
    swap = (100 * found[f"accuracy/language_swap{end}"] for end in ("", "/low", "/high"))
    return [
        f"predicted flow of {int(found['n'])} held-out clips: ADE {found['flow/ade_cm']:.1f} cm, "
        f"FDE {found['flow/fde_cm']:.1f} cm (standing still: {found['flow/zero_motion_ade_cm']:.1f} and "
        f"{found['flow/zero_motion_fde_cm']:.1f} cm)",
        "other instructions for the same images are followed in {:.0f}% of cases ({:.0f} to {:.0f})".format(*swap),
    ]


def _success_lines(found: dict[str, float], split: str, episodes: FlowEpisodesConfig) -> list[str]:
    arms = " and ".join(episodes.arms)
    lines = [f"success of the {arms}, not shown in any clip (95% interval)"]
    planned = list_episodes(episodes)
    for family, words in FAMILIES.items():
        count = sum(episode.family == family for episode in planned)
        if count:
            lines.append(f"  {words:<15} {_share(found, f'{split}/success/closed_loop/family={family}')} of {count}")
    lines.append(f"  {'all':<15} {_share(found, f'{split}/success/closed_loop')} of {len(planned)}")
    broken = int(found[f"{split}/episode/failed/closed_loop"])
    return lines + ([f"  {broken} episodes failed with an error and are not counted"] if broken else [])


def _share(found: dict[str, float], name: str) -> str:
    value, low, high = (100 * found.get(f"{name}{end}", float("nan")) for end in ("", "/low", "/high"))
    return f"{value:5.1f}% ({low:4.1f} to {high:5.1f})"
