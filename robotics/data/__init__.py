"""Robot data as files: reads and writes LeRobotDataset v3.0 without the lerobot package.

Importing this package loads neither pyarrow, PyAV nor Pillow; that happens when a file is opened.
"""

from robotics.data.features import robot_features
from robotics.data.layout import StorageSettings
from robotics.data.reader import EpisodeData, FrameSample, LeRobotReader, action_chunks
from robotics.data.statistics import aggregate_statistics, image_statistics, vector_statistics
from robotics.data.writer import EpisodeWriter

__all__ = [
    "EpisodeData",
    "EpisodeWriter",
    "FrameSample",
    "LeRobotReader",
    "StorageSettings",
    "action_chunks",
    "aggregate_statistics",
    "image_statistics",
    "robot_features",
    "vector_statistics",
]
