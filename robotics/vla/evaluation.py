"""Success of a robot policy over fixed initial states, with everything that makes the number reproducible.

Each finished episode is one line of `episodes/<split>-<protocol>-<fingerprint>.jsonl` in the run's folder. The
fingerprint is that of weights, protocol and initial states, so an evaluation that was cut off goes on where it stopped,
and one of other weights never mixes with it. Several processes write a file each, which are joined at the end; episodes
whose environment broke down are tried again. Pictures come from carrying out the recorded actions of the first failures
and successes once more.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn

from mmrl.errors import RunError
from mmrl.fields import bounded
from mmrl.training.loop.distributed import merge_lists, shard
from mmrl.training.loop.recipe import Evaluation
from mmrl.training.loop.seeds import make_generator
from mmrl.training.loop.settings import EvaluationConfig
from mmrl.training.record.jsonlines import JsonLines, finite_or_none, read_jsonl, write_atomically
from mmrl.training.record.metrics import metric_label
from mmrl.training.record.samples import SampleRecord
from mmrl.training.record.statistics import cluster_bootstrap_interval, wilson_interval
from robotics.sim.episodes import EpisodeSpec, RobotSim
from robotics.sim.opening import open_sim
from robotics.vla.collect import ActingSettings, Episodes, action_scale, replay_episode, run_episodes
from robotics.vla.tasks import episode_id

if TYPE_CHECKING:
    from robotics.vla.recipe import RobotRecipe

__all__ = ["RobotEvaluationConfig", "evaluate_split", "success_table"]

LOGGER = logging.getLogger("mmrl")


@dataclass
class RobotEvaluationConfig(EvaluationConfig):
    """Evaluation in a simulator: greedy episodes, and sampled ones where `samples` asks for them."""

    samples: int = 0
    """Further episodes of each initial state with sampled actions; 0 = none."""
    videos: int = bounded(2, at_least=0)
    """First failures and first successes of the headline split that are kept as mp4, that many of each; 0 = none. None
    either where the simulator draws nothing and there is no `video_size`."""
    fps: int = bounded(10, at_least=1)
    """Control steps that a second of video shows."""
    video_size: int = bounded(0, at_least=0)
    """Side of the videos in pixels, drawn by a simulator opened for them; 0 = what the policy sees."""


def evaluate_split(
    recipe: RobotRecipe, tasks: Sequence[EpisodeSpec], split: str, accelerator: Accelerator
) -> Evaluation:
    """Run every initial state and report success.

    Args:
        recipe: a robot recipe.
        tasks: initial states.
        split: name of the split.
        accelerator: processes to share the work with.

    Returns:
        success/greedy with its Wilson interval (success/sampled with a bootstrap interval over initial states), the
        same of each task, mean control steps of the successes, counts, and some episodes as records.
    """
    config = recipe.config.evaluation
    metrics: dict[str, float] = {"n": float(len(tasks))}
    records: list[SampleRecord] = []
    for protocol, repeats in (("greedy", int(config.greedy)), ("sampled", config.samples)):
        if repeats:
            rows = _run_protocol(recipe, tasks, split, protocol, repeats, accelerator)
            metrics |= _metrics(rows, protocol, recipe.config.seed)
            records = records or [_record(row) for row in rows[: config.records]]
    return Evaluation(metrics, records)


def success_table(rows: Sequence[dict[str, Any]]) -> str:
    """Successes of each task and overall, with Wilson intervals and how the failures ended.

    Args:
        rows: lines of an episodes file.

    Returns:
        Lines of text.
    """
    names = list(dict.fromkeys(row["task"] for row in rows))
    width = max([len(name) for name in names] + [len("all tasks")])
    lines = [f"{'task':<{width}}  success  95 % interval    failures"]
    for name in [*names, None]:
        own = [row for row in rows if name in (None, row["task"])]
        sound = [row for row in own if not row["failed"]]
        done = sum(row["success"] for row in sound)
        low, high = wilson_interval(done, len(sound))
        share = done / len(sound) if sound else float("nan")
        ends = ", ".join(f"{count} {reason}" for reason, count in _endings(own).items())
        label = "all tasks" if name is None else name
        lines.append(f"{label:<{width}}  {done:>3}/{len(sound):<3} {share:5.3f}  [{low:.3f}, {high:.3f}]  {ends}")
    return "\n".join(lines)


def _run_protocol(
    recipe: RobotRecipe,
    tasks: Sequence[EpisodeSpec],
    split: str,
    protocol: str,
    repeats: int,
    accelerator: Accelerator,
) -> list[dict[str, Any]]:
    """Lines of all episodes, those of an earlier, unfinished evaluation included."""
    about = _protocol(recipe, tasks, protocol, repeats, accelerator.num_processes)
    path = _episodes_path(recipe, split, protocol, about)
    wanted = [(index, repeat, task) for index, task in enumerate(tasks) for repeat in range(repeats)]
    known = _known(path, accelerator)
    left = [entry for entry in wanted if entry[:2] not in known]
    if known:
        LOGGER.info("%d of %d episodes are taken from %s", len(wanted) - len(left), len(wanted), path)
    found: list[dict[str, Any]] = []
    log = JsonLines(_part(path, accelerator))
    for batch in _batches(shard(left, accelerator), recipe):
        fresh = _run_batch(recipe, batch, split, protocol)
        found += fresh
        for row in fresh:
            log.append(_kept(row))
    log.close()
    everywhere = merge_lists(found, accelerator)
    rows = sorted([*known.values(), *everywhere], key=lambda row: (row["index"], row["repeat"]))
    if accelerator.is_main_process:
        _write(path, rows, about)
        for part in _parts(path):
            part.unlink()
        if protocol == "greedy" and split == next(iter(recipe.eval_tasks)):
            _write_videos(recipe, rows, split)
        LOGGER.info("%s, %s (%s):\n%s", split, protocol, _conditions(about), success_table(rows))
    return rows


def _known(path: Path, accelerator: Accelerator) -> dict[tuple[int, int], dict[str, Any]]:
    """Lines of an earlier evaluation by number and repeat, the same ones on every process."""
    lines = [row for file in (path, *_parts(path)) for row in read_jsonl(file)] if accelerator.is_main_process else []
    if accelerator.num_processes > 1:
        box = [lines]
        broadcast_object_list(box)
        lines = box[0]
    return {(row["index"], row["repeat"]): row for row in lines if not row["failed"]}


def _part(path: Path, accelerator: Accelerator) -> Path:
    """Where a process writes its lines while the others write theirs."""
    if accelerator.num_processes == 1:
        return path
    return path.with_name(f"{path.stem}.part-{accelerator.process_index:03d}.jsonl")


def _parts(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.stem}.part-*.jsonl"))


def _batch_size(recipe: RobotRecipe) -> int:
    largest = recipe.config.evaluation.batch_tasks
    return min(recipe.sim.capacity or largest, largest)


def _batches(entries: Sequence[Any], recipe: RobotRecipe) -> Iterator[Sequence[Any]]:
    from rich.progress import Progress

    size = _batch_size(recipe)
    shown = not recipe.config.tracking.quiet and len(entries) > size
    with Progress(*_columns(), disable=not shown, transient=True) as progress:
        bar = progress.add_task("episodes", total=len(entries))
        for start in range(0, len(entries), size):
            batch = entries[start : start + size]
            yield batch
            progress.advance(bar, len(batch))


def _columns() -> list[Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    ]


def _run_batch(
    recipe: RobotRecipe, batch: Sequence[tuple[int, int, EpisodeSpec]], split: str, protocol: str
) -> list[dict[str, Any]]:
    config = recipe.config
    generator = make_generator(config.seed, "evaluate", split, batch[0][0], batch[0][1])
    episodes = run_episodes(
        recipe.policy,
        recipe.sim,
        [task for _, _, task in batch],
        _acting(recipe, protocol),
        generator,
        greedy=protocol == "greedy",
    )
    return [_line(index, repeat, task, episodes, place) for place, (index, repeat, task) in enumerate(batch)]


def _acting(recipe: RobotRecipe, protocol: str) -> ActingSettings:
    """The run's settings; sampled episodes have the evaluation's temperature and no ensemble."""
    acting = recipe.config.acting
    if protocol == "greedy":
        return acting
    return replace(acting, temperature=recipe.config.evaluation.temperature, ensemble=0.0)


def _line(index: int, repeat: int, task: EpisodeSpec, episodes: Episodes, place: int) -> dict[str, Any]:
    payload = episodes.payload
    failed, success = bool(payload.failed[place]), bool(payload.success[place])
    reason = payload.reasons[place] if payload.reasons else ""
    return {
        "index": index,
        "repeat": repeat,
        "task": task.task,
        "instruction": task.instruction,
        "split": task.split,
        "layout": task.layout,
        "success": success,
        "failed": failed,
        "ending": _ending(failed, success, bool(payload.terminated[place])),
        "reason": reason,
        "steps": int(payload.lengths[place]),
        # the shortest text that reads back to the very float32, so that carrying it out again ends the same way
        "actions": [[float(str(entry)) for entry in action] for action in episodes.actions[place]],
        "film": payload.frames_of(place),
    }


def _ending(failed: bool, success: bool, terminated: bool) -> str:
    return "failed" if failed else "success" if success else "terminated" if terminated else "horizon"


def _metrics(rows: Sequence[dict[str, Any]], protocol: str, seed: int) -> dict[str, float]:
    sound = [row for row in rows if not row["failed"]]
    name = f"success/{protocol}"
    metrics = _share(sound, name, protocol, seed)
    for task in dict.fromkeys(row["task"] for row in rows):
        metrics |= _share([row for row in sound if row["task"] == task], f"{name}/{metric_label(task)}", protocol, seed)
    steps = [row["steps"] for row in sound if row["success"]]
    metrics[f"episode/steps_to_success/{protocol}"] = float(np.mean(steps)) if steps else float("nan")
    return metrics | {f"episode/failed/{protocol}": float(len(rows) - len(sound))}


def _share(rows: Sequence[dict[str, Any]], name: str, protocol: str, seed: int) -> dict[str, float]:
    groups: dict[int, list[float]] = {}
    for row in rows:
        groups.setdefault(row["index"], []).append(float(row["success"]))
    values = [value for group in groups.values() for value in group]
    if not values:
        return dict.fromkeys((name, f"{name}/low", f"{name}/high"), float("nan"))
    if protocol == "greedy":
        low, high = wilson_interval(sum(values), len(values))
    else:
        low, high = cluster_bootstrap_interval(list(groups.values()), np.random.default_rng(seed))
    return {name: float(np.mean(values)), f"{name}/low": low, f"{name}/high": high}


def _record(row: dict[str, Any]) -> SampleRecord:
    from PIL import Image

    film = row.get("film")
    shown = [] if film is None else [Image.fromarray(film[place]) for place in _places(len(film))]
    return SampleRecord(
        id=episode_id(EpisodeSpec(row["task"], row["instruction"], row["layout"], row["split"])),
        prompt=row["instruction"],
        response=f"{row['steps']} control steps",
        outputs=shown,
        reward=float(row["success"]),
        finish=row["reason"] or row["ending"],
        correct=row["success"],
    )


def _places(count: int) -> list[int]:
    return sorted({0, count // 2, count - 1})


def _protocol(
    recipe: RobotRecipe, tasks: Sequence[EpisodeSpec], protocol: str, repeats: int, processes: int
) -> dict[str, Any]:
    """What the numbers depend on."""
    config, acting = recipe.config, _acting(recipe, protocol)
    scale = action_scale(recipe.policy, acting)
    about = {
        "protocol": protocol,
        "repeats": repeats,
        "initial_states": _digest(json.dumps([asdict(task) for task in tasks]).encode()),
        "seed": config.seed,
        "batch": _batch_size(recipe),
        "processes": processes,
        "chunk": recipe.policy.chunk,
        "n_action_steps": acting.n_action_steps or recipe.policy.chunk,
        "temperature": acting.temperature,
        "ensemble": acting.ensemble,
        "scale": acting.scale if scale is None else scale.as_dict(),
        "weights": _weights_digest(recipe.policy),
        "code": recipe.code,
        "precision": config.trainer.mixed_precision,
        "device": next(recipe.policy.parameters(), torch.zeros(0)).device.type,
        "torch": torch.__version__,
    }
    return about | {"simulator": dict(recipe.sim.describe())}


def _conditions(about: dict[str, Any]) -> str:
    """The protocol in one line."""
    shown = {**{name: about[name] for name in ("seed", "chunk", "n_action_steps", "weights")}, **about["simulator"]}
    return ", ".join(f"{name} {value}" for name, value in shown.items() if not isinstance(value, dict))


def _weights_digest(policy: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(policy.state_dict().items()):
        digest.update(name.encode())
        if isinstance(value, torch.Tensor):
            digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _episodes_path(recipe: RobotRecipe, split: str, protocol: str, about: dict[str, Any]) -> Path:
    fingerprint = _digest(json.dumps(about, sort_keys=True, default=str).encode())
    return Path(recipe.config.output_dir) / "episodes" / f"{split}-{protocol}-{fingerprint}.jsonl"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def _write(path: Path, rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(finite_or_none(_kept(row)), ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
    write_atomically(path, "".join(lines))
    write_atomically(path.with_suffix(".protocol.json"), json.dumps(about, indent=2, default=str) + "\n")


def _kept(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "film"}


def _write_videos(recipe: RobotRecipe, rows: Sequence[dict[str, Any]], split: str) -> None:
    """Carry out the first failures and successes once more and keep their pictures."""
    config = recipe.config.evaluation
    tried = [row for row in rows if not row["failed"] and row["actions"]]
    chosen = [row for wanted in (True, False) for row in [r for r in tried if r["success"] is wanted][: config.videos]]
    if not chosen or (recipe.sim.image_size is None and not config.video_size):
        return
    with _video_simulator(recipe) as sim:
        for row in chosen:
            _write_video(recipe, sim, row, split)


@contextmanager
def _video_simulator(recipe: RobotRecipe) -> Iterator[RobotSim]:
    """The run's own simulator, or one like it with larger pictures."""
    size = recipe.config.evaluation.video_size
    if not size or (size, size) == recipe.sim.image_size:
        yield recipe.sim
        return
    sim = open_sim(replace(recipe.config.sim, image_size=size, workers=1))
    try:
        yield sim
    finally:
        sim.close()


def _write_video(recipe: RobotRecipe, sim: RobotSim, row: dict[str, Any], split: str) -> None:
    from robotics.sim.video import write_mp4

    episode = EpisodeSpec(row["task"], row["instruction"], row["layout"], row["split"])
    try:
        frames, success = replay_episode(sim, episode, np.asarray(row["actions"], np.float32), recipe.policy.chunk)
    except RunError as error:
        LOGGER.warning("there is no video of %s: %s", episode_id(episode), error)
        return
    if success != row["success"]:
        LOGGER.warning("%s ended differently when it was carried out again", episode_id(episode))
    if not len(frames):
        return
    folder = Path(recipe.config.output_dir) / "videos"
    folder.mkdir(parents=True, exist_ok=True)
    name = "success" if row["success"] else "failure"
    label = f"step-{recipe.step:06d}-{split}-{name}-{row['task'].replace('/', '.')}-{row['layout']}.mp4"
    write_mp4(folder / label, frames, recipe.config.evaluation.fps)


def _endings(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    ends = [row["reason"] or row["ending"] for row in rows if not row["success"] or row["failed"]]
    return {reason: ends.count(reason) for reason in dict.fromkeys(ends)}
