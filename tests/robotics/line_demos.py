"""Demonstrations on the line, and the smallest policies that can learn from them."""

import numpy as np

from robotics.sim.episodes import EpisodeSpec
from tests.robotics.line_sim import LineSim

ENCODER = {"width": 32, "heads": 2, "layers": 1, "channels": 8, "keypoints": 4}
"""Settings of a policy that trains in a moment."""
BLIND = {**ENCODER, "image_size": None}
"""The same without images."""
SPEED = 0.5
"""Share of a full step that the demonstrator goes; 6 to 12 steps an episode."""


def demonstrate(path, episodes=4, camera="", failures=(), stretch=1.0):
    """Write one episode per layout, alternating between both tasks; `stretch` scales the actions to other units."""
    from robotics.data import EpisodeWriter, robot_features
    from robotics.data.features import REWARD

    sim = LineSim()
    cameras = {camera: sim.image_size} if camera else {}
    features = robot_features(2, 1, cameras, video=False) | {REWARD: {"dtype": "float32", "shape": [1], "names": None}}
    with EpisodeWriter(path, 10, features) as writer:
        for layout in range(episodes):
            task = ("right", "left")[layout % 2]
            seen = sim.reset([EpisodeSpec(task, f"go {task}", layout)]).observation
            states, images, actions, rewards = [], [], [], []
            while len(sim.live):
                place, goal = seen.state[0]
                step = SPEED * np.sign(goal - place) * (-1 if layout in failures else 1)
                states.append(seen.state[0])
                images.append(seen.images[0])
                actions.append([step])
                result = sim.step_chunk(np.full((1, 1, 1), step))
                rewards.append(result.rewards[0])
                seen = result.observation
            pictures = {camera: np.stack(images)} if camera else {}
            done, extra = layout not in failures, {REWARD: np.array(rewards, np.float32)}
            writer.add_episode(np.stack(states), stretch * np.array(actions), pictures, f"go {task}", done, extra)
    return path
