"""3DFlowAction: a world model of how an object will move, and a planner that makes any arm carry out the motion.

From RGB-D video to 3D flow, a diffusion model over 3D flow, a check of the predicted outcome, and actions.

Source: arXiv 2506.06199.
"""
