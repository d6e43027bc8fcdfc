"""Robots: simulation, 3D flow and vision-language-action policies.

Three rooms will live here: `robotics.sim` (MuJoCo scenes as Gymnasium environments, rendering, scripted experts),
`robotics.flow3d` (3DFlowAction: data pipeline, flow world model, planning and closed loop) and `robotics.vla`
(policies, behaviour cloning, SRPO). Importing this package loads none of them.
"""

__all__: list[str] = []
