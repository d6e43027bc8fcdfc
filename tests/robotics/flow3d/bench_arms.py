"""The suite's arms with the interface of a flow planner."""

from robotics.scenes.arms import find_arm


class BenchArm:
    def __init__(self, name):
        self.model = find_arm(name)
        self.name, self.joints, self.home_rad = name, self.model.joints, self.model.home_rad
        self.grip_site, self.max_opening_m = self.model.grip_site, 2 * self.model.opening_m

    def load(self):
        return self.model.load()
