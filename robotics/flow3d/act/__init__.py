"""From a flow to actions: motion of the object, grasps, joint paths, and the optimisation over a chunk."""
