"""Implementation of `mmrl sim` (suites, experts, episodes to look at) and of `mmrl robot` (a person in the loop)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from mmrl.errors import UserError

Say = Callable[[str], object]


def setup(name: str, folder: Path | None, say: Say) -> None:
    """Install a suite into a separate Python environment."""
    from robotics.sim.suite_setup import setup_suite

    setup_suite(name, folder, say=say)


def experts(name: str, episodes: int, options: Sequence[str], say: Say, replay: bool = False) -> bool:
    """Run the experts of all tasks and print their success; returns whether all environments ran without failing.

    Args:
        name: tabletop, metaworld, or another simulator with experts.
        episodes: of each task.
        options: `field=value` of `SimConfig`.
        say: takes lines to print.
        replay: also print how often the actions of one episode solve the others.
    """
    from mmrl.config import fill
    from robotics.scenes.expert_check import check_experts, replay_experts, replay_line, summary_lines
    from robotics.scenes.tabletop_tasks import TASKS
    from robotics.sim.opening import SimConfig, open_sim

    base = SimConfig(kind=name, image_size=0, tasks=list(TASKS) if name == "tabletop" else [])
    config: SimConfig = fill(base, options, "mmrl sim")
    if episodes < 1:
        raise UserError(f"--episodes is {episodes}; must be at least 1")
    if replay and episodes < 2:
        raise UserError(f"--episodes is {episodes}; --replay needs at least 2, so that one can be replayed in another")
    sim = open_sim(config)
    rows = []
    try:
        say(", ".join(f"{key} {value}" for key, value in sim.describe().items() if not isinstance(value, dict)))
        for task, done, count, failed in check_experts(sim, episodes):
            rows.append((task, done, count, failed))
            say(f"{task:<28} {done:>3} of {count:<3}" + (f"  {failed} environments failed" if failed else ""))
            if replay:
                say(replay_line(replay_experts(sim, task, episodes)))
    finally:
        sim.close()
    for line in summary_lines(rows):
        say(line)
    return not any(failed for *_, failed in rows)


def play(
    task: str,
    options: Sequence[str],
    say: Say,
    *,
    policy: str,
    episodes: int,
    seed: int,
    video: Path | None,
    strip: Path | None,
    allow: Sequence[str] = (),
) -> None:
    """Show episodes of a task in a window, or write them to files."""
    from mmrl.config import fill
    from robotics.scenes.mjcf_task import find_any_task
    from robotics.scenes.play import ACTORS, Actor, PlaySettings
    from robotics.scenes.play import play as run

    find_any_task(task)
    settings: PlaySettings = fill(PlaySettings, options, "mmrl sim play")
    if video is None and strip is None:
        from robotics.scenes.viewer import check_display

        check_display()  # before a policy is loaded
    actor: Actor
    if policy in ACTORS:
        actor = ACTORS[policy](seed)
    elif Path(policy).is_dir():
        from robotics.serving.acting import PolicyActor

        actor = PolicyActor(Path(policy), settings.temperature, seed, settings.step, allow, task=task)
    else:
        raise UserError(
            f"--policy is '{policy}', which is neither one of {', '.join(ACTORS)} nor the folder of a run or policy"
        )
    run(task, actor, settings, say, episodes=episodes, seed=seed, video=video, strip=strip)


def intervene(config: Path, overrides: Sequence[str], say: Say, *, learn: bool) -> None:
    """Watch the episodes of a policy, take over, and let it learn meanwhile."""
    from robotics.interventions.session import intervene as run

    count = run(config, overrides, say, learn=learn)
    say(f"recorded: {count} episodes")
