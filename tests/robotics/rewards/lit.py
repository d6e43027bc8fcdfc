"""Episodes whose success is a lit square, and classifiers that see it."""

import numpy as np
import torch

from mmrl.runs.tracking import TrackingConfig
from mmrl.training.settings import BaseTrainerConfig, CheckpointConfig
from robotics.policies.base.encoder import EncoderConfig, Vocabulary
from robotics.rewards.success_classifier import SuccessClassifier, SuccessModelConfig
from robotics.rewards.success_data import LabelledEpisodesConfig
from robotics.rewards.success_recipe import SuccessRunConfig

SMALL = {"width": 32, "heads": 2, "layers": 1, "channels": 8, "keypoints": 4}
TEXT = "light the square"


def write_episodes(path, successes=4, failures=4, frames=5, after=2):
    """Episodes of noise; those that succeed show a lit square in their last `after` frames."""
    from robotics.data import EpisodeWriter, robot_features

    features = robot_features(1, 1, {"front": (32, 32)}, video=False)
    features["next.reward"] = {"dtype": "float32", "shape": [1], "names": None}
    rng = np.random.default_rng(0)
    with EpisodeWriter(path, 10, features) as writer:
        for number in range(successes + failures):
            solved = number < successes
            images = rng.integers(0, 60, (frames, 32, 32, 3), dtype=np.uint8)
            labels = (np.arange(frames) >= frames - after) & solved
            images[labels, 8:20, 8:20] = 255
            # of the observation after the action
            rewards = np.append(labels[1:], solved).astype(np.float32)[:, None]
            ones = np.ones((frames, 1), np.float32)
            writer.add_episode(ones, ones, {"front": images}, TEXT, solved, {"next.reward": rewards})
    return path


def lit_config(folder, episodes, **changes):
    """A tiny run of robot_success."""
    if not episodes.exists():
        write_episodes(episodes)
    settings = {
        "recipe": "robot_success",
        "output_dir": str(folder),
        "model": SuccessModelConfig(looks=1, width=16, encoder=EncoderConfig(**SMALL)),
        "data": LabelledEpisodesConfig(path=str(episodes), positive_frames=2),
        "trainer": BaseTrainerConfig(steps=2, tasks_per_step=8, learning_rate=3e-3, threads=1),
        "checkpoint": CheckpointConfig(keep=0),
        "tracking": TrackingConfig(quiet=True, tensorboard=False),
    }
    config = SuccessRunConfig(**(settings | changes))
    config.validate()
    return config


def always(answer, texts=("go right", "go left"), camera="", **changes):
    """A classifier of 32 x 32 images that gives one probability, whatever it sees."""
    sizes = EncoderConfig(**SMALL, image_size=(32, 32))
    config = SuccessModelConfig(**({"threshold": 0.5, "looks": 1, "width": 16, "encoder": sizes} | changes))
    judge = SuccessClassifier(config, Vocabulary.from_texts(texts), camera).eval()
    torch.nn.init.zeros_(judge.head[-1].weight)
    torch.nn.init.constant_(judge.head[-1].bias, float(np.log(answer / (1 - answer))))
    return judge
