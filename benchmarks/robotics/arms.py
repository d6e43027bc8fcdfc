"""The arms of `python -m benchmarks sim`: each function runs in its own process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness import check
from benchmarks.measure import Stopwatch, repeat
from robotics.sim import FrameRenderer, ImageRollout, RenderSettings, fast_visuals
from robotics.toy.arm_cubes import ReachCube, load_arm_cubes

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray

CAMERA = "front"
SPREAD_RAD = 0.3
"""Standard deviation of the commanded joint angles around the home pose."""


class _Endless(ReachCube):
    """The same scenes without an end, so that every arm steps all of them to the last."""

    def score(self, steps: Any) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        rewards, ends = super().score(steps)
        return rewards, np.zeros_like(ends)


def loop_arm(arm: dict[str, Any]) -> dict[str, Any]:
    """Each scene and control step: `mj_step` for the physics steps, then an image with MuJoCo's own renderer."""
    import mujoco

    model, actions = load_arm_cubes(), _actions(arm)
    scenes = _start(model, arm["scenes"])
    with mujoco.Renderer(model, arm["size_px"], arm["size_px"]) as renderer:

        def once(watch: Stopwatch) -> None:
            for step in range(arm["steps"]):
                for scene, data in enumerate(scenes):
                    data.ctrl[:] = actions[scene, step]
                    for _ in range(arm["substeps"]):
                        mujoco.mj_step(model, data)
                    renderer.update_scene(data, CAMERA)
                    renderer.render()

        measured = repeat(once, arm["repetitions"])
    return measured | {"counts": _counts(arm, images=arm["scenes"] * arm["steps"])}


def rollout_arm(arm: dict[str, Any]) -> dict[str, Any]:
    """The same scenes and actions with `ImageRollout`, an image at the end of each chunk."""
    model, actions = load_arm_cubes(), _actions(arm)
    settings = RenderSettings(arm["size_px"], arm["size_px"], CAMERA)
    chunks = np.split(actions, arm["steps"] // arm["chunk"], axis=1)
    rollout = ImageRollout(
        model,
        _Endless(model),
        arm["scenes"],
        settings,
        substeps=arm["substeps"],
        workers=arm["workers"],
        backend=arm["backend"],
    )
    with rollout:

        def once(watch: Stopwatch) -> None:
            for chunk in chunks:
                rollout.step_chunk(chunk)

        rollout.reset(range(arm["scenes"]))
        measured = repeat(once, arm["repetitions"])
        checks = _compare_with_loop(arm, rollout, actions)
    return measured | {"counts": _counts(arm, images=arm["scenes"] * len(chunks)), "checks": checks}


def least_arm(arm: dict[str, Any]) -> dict[str, Any]:
    """Lower bound of any renderer: the physics in a `mj_step` loop, and writing the images' bytes once."""
    import mujoco

    model, actions = load_arm_cubes(), _actions(arm)
    scenes = _start(model, arm["scenes"])
    image = np.ones((arm["size_px"], arm["size_px"], 3), np.uint8)
    delivered = np.empty((arm["scenes"], *image.shape), np.uint8)

    def once(watch: Stopwatch) -> None:
        for step in range(arm["steps"]):
            for scene, data in enumerate(scenes):
                data.ctrl[:] = actions[scene, step]
                mujoco.mj_step(model, data, arm["substeps"])
                delivered[scene] = image

    return repeat(once, arm["repetitions"]) | {"counts": _counts(arm, images=arm["scenes"] * arm["steps"])}


def image_arm(arm: dict[str, Any]) -> dict[str, Any]:
    """One image after another of scenes that stand still, drawn in one of four ways."""
    import mujoco

    model, size = load_arm_cubes(), arm["size_px"]
    scenes = _poses(model, count=8)
    if arm["way"] == "ours":
        with FrameRenderer(model, RenderSettings(size, size, CAMERA), arm["backend"]) as ours:

            def draw(data: mujoco.MjData) -> NDArray[np.uint8]:
                return ours.rgb(data)

            return _draw_images(arm, scenes, draw)
    multisampling = arm["way"] == "no shadows"
    if arm["way"] != "default":
        fast_visuals(model, RenderSettings(size, size, multisampling=multisampling))
    with mujoco.Renderer(model, size, size) as theirs:

        def draw_all(data: mujoco.MjData) -> NDArray[np.uint8]:
            theirs.update_scene(data, CAMERA)
            return theirs.render()

        return _draw_images(arm, scenes, draw_all)


def physics_arm(arm: dict[str, Any]) -> dict[str, Any]:
    """States only, stepped in one of four ways."""
    model, actions = load_arm_cubes(), _actions(arm)
    measured = PHYSICS[arm["way"]](arm, model, actions)
    return measured | {"counts": _counts(arm, images=0)}


def _step_loop(arm: dict[str, Any], model: mujoco.MjModel, actions: NDArray[np.float64]) -> dict[str, Any]:
    import mujoco

    scenes = _start(model, arm["scenes"])
    calls, steps = (1, arm["substeps"]) if arm["way"] == "nstep" else (arm["substeps"], 1)

    def once(watch: Stopwatch) -> None:
        for step in range(arm["steps"]):
            for scene, data in enumerate(scenes):
                data.ctrl[:] = actions[scene, step]
                for _ in range(calls):
                    mujoco.mj_step(model, data, steps)

    return repeat(once, arm["repetitions"])


def _native(arm: dict[str, Any], model: mujoco.MjModel, actions: NDArray[np.float64]) -> dict[str, Any]:
    import mujoco
    from mujoco import rollout

    scenes = _start(model, arm["scenes"])
    full = int(mujoco.mjtState.mjSTATE_FULLPHYSICS)
    states = np.empty((arm["scenes"], mujoco.mj_stateSize(model, full)))
    controls = np.repeat(actions, arm["substeps"], axis=1)
    workspace = [mujoco.MjData(model) for _ in range(max(1, arm["workers"]))]
    with rollout.Rollout(nthread=arm["workers"]) as pool:

        def once(watch: Stopwatch) -> None:
            for state, data in zip(states, scenes, strict=True):
                mujoco.mj_getState(model, data, state, full)
            reached, _ = pool.rollout(model, workspace, states, controls)
            for state, data in zip(reached[:, -1], scenes, strict=True):
                mujoco.mj_setState(model, data, state, full)

        return repeat(once, arm["repetitions"])


def _ours(arm: dict[str, Any], model: mujoco.MjModel, actions: NDArray[np.float64]) -> dict[str, Any]:
    task = _Endless(model)
    with ImageRollout(model, task, arm["scenes"], None, substeps=arm["substeps"], workers=arm["workers"]) as rollout:

        def once(watch: Stopwatch) -> None:
            for start in range(0, arm["steps"], arm["chunk"]):
                rollout.step_chunk(actions[:, start : start + arm["chunk"]])

        rollout.reset(range(arm["scenes"]))
        return repeat(once, arm["repetitions"])


def _compare_with_loop(
    arm: dict[str, Any], rollout: ImageRollout, actions: NDArray[np.float64]
) -> dict[str, dict[str, Any]]:
    import mujoco

    scenes = _start(rollout.model, arm["scenes"])
    for step in range((arm["repetitions"] + 1) * arm["steps"]):
        for scene, data in enumerate(scenes):
            data.ctrl[:] = actions[scene, step % arm["steps"]]
            mujoco.mj_step(rollout.model, data, arm["substeps"])
    differences = [np.abs(_state(data) - _state(rollout.data(scene))).max() for scene, data in enumerate(scenes)]
    checks = {"states, difference to a mj_step loop": check(float(max(differences)), 0.0)}
    return checks | (_compare_images(arm, scenes) if arm["compare_images"] else {})


def _compare_images(arm: dict[str, Any], scenes: list[mujoco.MjData]) -> dict[str, dict[str, Any]]:
    import mujoco

    model, size = load_arm_cubes(), arm["size_px"]
    for data in scenes:
        mujoco.mj_forward(model, data)
    with FrameRenderer(model, RenderSettings(size, size, CAMERA), arm["backend"]) as ours:
        drawn = [ours.rgb(data).copy() for data in scenes]
        objects = [ours.segmentation(data) for data in scenes]
    with mujoco.Renderer(model, size, size) as default:
        default.enable_segmentation_rendering()
        other_objects = _differing(default, scenes, objects)
    with mujoco.Renderer(fast_visuals(model), size, size) as everything:
        other_colours = _differing(everything, scenes, drawn)
    return {
        "pixels that differ from mujoco.Renderer without shadows and multisampling": check(other_colours, 0),
        "pixels that show a different object than with default settings": check(other_objects, 0),
    }


def _differing(renderer: mujoco.Renderer, scenes: list[mujoco.MjData], images: list[NDArray[Any]]) -> int:
    count = 0
    for data, image in zip(scenes, images, strict=True):
        renderer.update_scene(data, CAMERA)
        count += int((renderer.render() != image).any(axis=-1).sum())
    return count


def _draw_images(arm: dict[str, Any], scenes: list[mujoco.MjData], draw: Any) -> dict[str, Any]:
    def once(watch: Stopwatch) -> None:
        for number in range(arm["images"]):
            draw(scenes[number % len(scenes)])

    return repeat(once, arm["repetitions"]) | {"counts": {"images": arm["images"]}}


def _poses(model: mujoco.MjModel, count: int) -> list[mujoco.MjData]:
    import mujoco

    scenes = _start(model, count)
    actions = _actions({"scenes": count, "steps": 1})
    for data, action in zip(scenes, actions[:, 0], strict=True):
        data.ctrl[:] = action
        mujoco.mj_step(model, data, 200)
        mujoco.mj_forward(model, data)
    return scenes


def _start(model: mujoco.MjModel, count: int) -> list[mujoco.MjData]:
    import mujoco

    task = ReachCube(model)
    scenes = [mujoco.MjData(model) for _ in range(count)]
    for seed, data in enumerate(scenes):
        mujoco.mj_resetData(model, data)
        task.reset(model, data, np.random.default_rng(seed))
        mujoco.mj_forward(model, data)
    return scenes


def _actions(arm: dict[str, Any]) -> NDArray[np.float64]:
    model = load_arm_cubes()
    noise = np.random.default_rng(0).normal(0.0, SPREAD_RAD, (arm["scenes"], arm["steps"], model.nu))
    return np.asarray(model.key("home").ctrl) + noise


def _state(data: mujoco.MjData) -> NDArray[np.float64]:
    return np.concatenate([data.qpos, data.qvel, data.qacc_warmstart])


def _counts(arm: dict[str, Any], images: int) -> dict[str, int]:
    steps = arm["scenes"] * arm["steps"]
    size = arm.get("size_px", 0)
    return {
        "control_steps": steps,
        "physics_steps": steps * arm["substeps"],
        "images": images,
        "bytes": images * size * size * 3,
    }


PHYSICS = {"mj_step": _step_loop, "nstep": _step_loop, "rollout": _native, "ours": _ours}
