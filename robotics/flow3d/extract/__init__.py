"""From RGB-D video to clips of 3D flow.

    from robotics.flow3d.extract import FlowExtractor, read_rgbd_folder

    clip = FlowExtractor().extract(read_rgbd_folder("my_video"))

An extractor consists of a detector, a tracker and a source of depth (`robotics.flow3d.extract.backends`). The
defaults, `RevealedDepth` and `RigidChain`, need only a depth camera that does not move.
"""

from __future__ import annotations

from mmrl.entries import lazy_names

_NAMES = {
    "robotics.flow3d.extract.backends": ("DepthSource", "Detector", "PointTracker", "Tracks"),
    "robotics.flow3d.extract.clip_building": ("build_from_folder", "build_from_lerobot"),
    "robotics.flow3d.extract.depth": ("DenoisedDepth", "ModelDepth", "SensorDepth"),
    "robotics.flow3d.extract.extractor": (
        "FlowExtractor",
        "QualityLimits",
        "RevealedDepth",
    ),
    "robotics.flow3d.extract.models": (
        "FunctionDepth",
        "FunctionDetector",
        "FunctionTracker",
        "GroundedMask",
        "SegmentedBox",
        "WithoutGripper",
    ),
    "robotics.flow3d.extract.rigid_chain": ("RigidChain",),
    "robotics.flow3d.extract.simulated": ("SimSegmentation", "SimState"),
    "robotics.flow3d.extract.sources": ("LeRobotVideos", "read_rgbd_folder"),
    "robotics.flow3d.video": ("REASONS", "RejectedVideo", "RgbdVideo", "VideoTruth"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
