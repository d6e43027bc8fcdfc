"""An environment of gymnasium-robotics (Fetch, Shadow hand, Adroit, Franka kitchen, mazes) for the generic adapter.

Loaded by path in a Python that has gymnasium-robotics (made for 1.4.2), which does not support mujoco 4. The state is
the Dict observation with its entries concatenated in alphabetical order. Success comes from `info`; in the kitchen it
means that all tasks of the episode are done.

Source: Farama-Foundation/Gymnasium-Robotics.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import gymnasium_robotics

FAMILIES = ("Fetch", "HandReach", "HandManipulate", "AdroitHand", "FrankaKitchen", "PointMaze", "AntMaze")


class GymnasiumRoboticsError(Exception):
    """An option that this suite does not support; the message is for the user."""

    for_user = True


def make(
    tasks: list[str] | None = None,
    size: int = 128,
    horizon: int | None = None,
    shadows: bool = False,
    options: dict[str, Any] | None = None,
) -> gymnasium.Env:
    """Create the environment of a worker.

    Args:
        tasks: a single registered id, because sizes of states and actions differ; None = FetchReach-v4.
        size: width and height of the images in pixels.
        horizon: control steps per episode; None = as registered with the id.
        shadows: whether images have shadows and smooth edges, which takes a software renderer many times as long.
        options: further arguments of the environment, such as reward_type.
    """
    gymnasium.register_envs(gymnasium_robotics)
    names = tasks or ["FetchReach-v4"]
    if len(names) != 1:
        raise GymnasiumRoboticsError(
            f"sim.tasks has {len(names)} gymnasium-robotics ids; a simulator can only run one of them"
        )
    if not names[0].startswith(FAMILIES):
        raise GymnasiumRoboticsError(
            f"gymnasium-robotics has no {names[0]!r}; its ids begin with: {', '.join(FAMILIES)}"
        )
    known = {"render_mode": "rgb_array", "width": size, "height": size, **(options or {})}
    try:
        env = gymnasium.make(names[0], max_episode_steps=horizon, **known)
    except gymnasium.error.UnregisteredEnv as error:
        raise GymnasiumRoboticsError(str(error)) from None
    if names[0].startswith("FrankaKitchen"):
        env = KitchenSuccess(env)
    for holder in (env.unwrapped, *(getattr(env.unwrapped, inner, None) for inner in INNER_ENVIRONMENTS)):
        model = getattr(holder, "model", None)
        if model is not None and not shadows:
            model.light_castshadow[:] = False
            model.vis.quality.offsamples = 0
    name = names[0].split("-")[0]
    instruction = next((text for start, text in INSTRUCTIONS.items() if name.startswith(start)), name)
    env.metadata = {
        **env.metadata,
        "instruction": instruction,
        "image_size": (size, size),
        "suite": "gymnasium_robotics",
    }
    return env


class KitchenSuccess(gymnasium.Wrapper):
    """Reports in `info` whether all tasks of the kitchen are done."""

    def step(self, action: Any) -> Any:
        """Act; see `gymnasium.Env.step`."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        kitchen: Any = self.env.unwrapped
        done = len(info["episode_task_completions"]) == len(kitchen.goal)
        return observation, reward, terminated, truncated, {**info, "success": done}


INNER_ENVIRONMENTS = ("robot_env", "point_env", "ant_env")
"""Attributes of kitchen and mazes with the inner environment that has the scene."""

INSTRUCTIONS = {
    "FetchReach": "move the gripper to the red target",
    "FetchPush": "push the block to the red target",
    "FetchSlide": "slide the puck to the red target",
    "FetchPickAndPlace": "bring the block to the red target",
    "HandReach": "touch the targets with the fingertips",
    "HandManipulate": "turn the object to the pose of the target",
    "AdroitHandDoor": "open the door",
    "AdroitHandHammer": "hammer the nail into the board",
    "AdroitHandPen": "turn the pen to the pose of the target",
    "AdroitHandRelocate": "bring the ball to the target",
    "FrankaKitchen": "do the tasks of the kitchen",
    "PointMaze": "go to the target",
    "AntMaze": "walk to the target",
}
