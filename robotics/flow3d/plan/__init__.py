"""From a predicted flow to motions of an arm: verdicts, grasps, planning and execution."""
