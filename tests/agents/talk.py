"""An environment in which every answer is an action; its text determines the reward and the next observation."""

import numpy as np

from mmrl.agents.environments.environment import Action


class Talk:
    """Two turns or more; each earns the share of vowels in the answer."""

    def __init__(self, pictures=True, turns=2):
        self.pictures, self.turns = pictures, turns

    def reset(self, task, seed):
        self.said, self.seed = [], seed
        return self._look()

    def step(self, action):
        text = action.arguments.get("text", "")
        self.said.append(text)
        vowels = sum(letter in "aeiou" for letter in text.lower())
        return self._look(), vowels / max(len(text), 1), len(self.said) == self.turns

    def expert(self):
        return Action("say", {"text": "aeiou"[: 1 + len(self.said)]})

    def close(self):
        pass

    def _look(self):
        if not self.pictures:
            return f"{self.seed % 7}: {len(self.said)} said, the last was {self.said[-1:]}"
        image = np.full((56, 56, 3), 30 * self.seed % 256, np.uint8)
        image[: 8 + len("".join(self.said)) % 40] = 240
        return {"image": image, "text": f"{len(self.said)} said"}


class Costly(Talk):
    """Talk in which every turn costs a tenth."""

    def step(self, action):
        observation, _, over = super().step(action)
        return observation, -0.1, over


class Flood:
    """Three turns with short texts, then one of many words; each turn earns a quarter."""

    def __init__(self, words=400, turns=9):
        self.words, self.turns = words, turns

    def reset(self, task, seed):
        self.said = 0
        return "go"

    def step(self, action):
        self.said += 1
        return "no " * (1 if self.said < 3 else self.words), 0.25, self.said == self.turns

    def close(self):
        pass


class Guess:
    """Find a number from 1 to 8; other words cost a tenth or are refused, and there are four turns."""

    def __init__(self, refuses=False):
        self.refuses = refuses

    def reset(self, task, seed):
        self.goal, self.turns = 1 + seed % 8, 0
        return "guess"

    def step(self, action):
        self.turns += 1
        said = action.arguments.get("text", "").strip()
        if said == str(self.goal):
            return "yes", 1.0, True, {"success": True}
        over = self.turns == 4
        if said in [*"12345678"]:
            return "another", 0.0, over
        if self.refuses:
            return "a number, please", 0.0, over, {"action_error": "no number"}
        return "a number, please", -0.1, over

    def close(self):
        pass
