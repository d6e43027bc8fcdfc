"""An OpenEnv server for the tests of `mmrl.agents.environments.openenv`: python openenv_server.py PORT SESSIONS."""

import os
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    number: int
    note: str = ""


class Seen(Observation):
    text: str = ""
    pid: int = 0


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    goal, turns = None, 0

    def reset(self, seed=None, episode_id=None, top=10, **options):
        self.goal, self.turns = seed % top, 0
        return Seen(text=f"guess 0 to {top - 1}", pid=os.getpid())

    def step(self, action, timeout_s=None, **options):
        if action.note == "stuck":
            raise RuntimeError("stuck")
        self.turns += 1
        done = action.number == self.goal
        return Seen(text="yes" if done else str(self.turns), done=done, reward=1.0 if done else None)

    @property
    def state(self):
        return State(step_count=self.turns)


app = create_app(Guessing, Guess, Seen, max_concurrent_envs=int(sys.argv[2]))
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="critical")
