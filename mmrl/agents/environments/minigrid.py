"""MiniGrid's tasks for agents that see images: the grid as an image, the mission as text, actions by name.

    environment: {factory: "mmrl.agents.environments.minigrid:make", kwargs: {id: MiniGrid-DoorKey-5x5-v0}}

Source: Farama-Foundation/Minigrid minigrid/wrappers.py (image observations), minigrid/core/actions.py (action names).
"""

from __future__ import annotations

import difflib
from typing import Any

from mmrl.agents.environments.gym import GymEnvironment
from mmrl.errors import UserError


def make(
    id: str, *, full_view: bool = True, tile_size: int = 28, max_steps: int | None = None, direction: bool = False
) -> GymEnvironment:
    """Make one of MiniGrid's environments.

    Args:
        id: registered name, such as `MiniGrid-Empty-5x5-v0`.
        full_view: whether the image shows the whole grid; otherwise the agent's view of 7 x 7 cells.
        tile_size: pixels of a cell.
        max_steps: moves after which an episode is truncated; the environment's own number when None.
        direction: whether the text names the direction that the agent faces, which a full view shows as well.

    Returns:
        The environment.

    Raises:
        UserError: minigrid is not installed, there is no such environment, or a number is out of range.
    """
    try:
        import gymnasium
        from minigrid import wrappers  # registers its environments on import
    except ModuleNotFoundError as error:
        raise UserError(
            f"{id} needs the package {error.name}, which is not installed: pip install 'mmrl-suite[minigrid]'"
        ) from None
    known = sorted(name for name in gymnasium.registry if name.startswith(("MiniGrid-", "BabyAI-")))
    if id not in known:
        close = difflib.get_close_matches(id, known, n=3)
        raise UserError(f"MiniGrid has no {id!r}; {'did you mean' if close else 'it has'} {', '.join(close or known)}")
    if not 4 <= tile_size <= 256 or (max_steps is not None and max_steps < 1):
        raise UserError(f"tile_size is {tile_size}, max_steps {max_steps}; expected 4 to 256, and at least 1")
    options: dict[str, Any] = {} if max_steps is None else {"max_steps": max_steps}
    env: Any = gymnasium.make(id, **options)
    view = wrappers.RGBImgObsWrapper if full_view else wrappers.RGBImgPartialObsWrapper
    names = [action.name for action in env.unwrapped.actions]
    return GymEnvironment(
        view(env, tile_size=tile_size),
        action_names=names,
        image_keys=["image"],
        text_keys=["mission", "direction"] if direction else ["mission"],
        task_options=False,
    )
