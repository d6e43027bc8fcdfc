"""Log in: user name and password, and as further sub-goals a tick and a role in a native select."""

from __future__ import annotations

from random import Random

from mmrl.gui.toy.tasks.case import Case, Move, View, click, fill, pick

USERS = ("anna", "bruno", "carla", "david", "elena", "felix", "greta", "hugo")
WORDS = ("river", "candle", "orbit", "maple", "velvet", "copper", "lantern", "pepper")
ROLES = ("Guest", "Editor", "Admin", "Viewer")
OTHERS = ("Sign up", "Log in with a code", "Forgot password", "Help", "Log in as guest")


def make(draw: Random, sub_goals: int, distractors: int) -> Case:
    """A case."""
    user, word = draw.choice(USERS), f"{draw.choice(WORDS)}{draw.randint(10, 99)}"
    extras = draw.sample(("remember", "role"), min(2, sub_goals - 1))
    role = draw.choice(ROLES[1:])
    wishes = [f'Log in as "{user}" with the password "{word}"']
    wishes += ["stay remembered"] if "remember" in extras else []
    wishes += [f"in the role {role}"] if "role" in extras else []
    return Case(
        f"{', '.join(wishes)}.",
        {
            "title": "Log in",
            "user": user,
            "word": word,
            "role": role,
            "roles": list(ROLES),
            "ask_remember": "remember" in extras,
            "ask_role": "role" in extras,
            "others": draw.sample(OTHERS, min(distractors, len(OTHERS))),
        },
    )


def expert(case: Case, view: View) -> Move:
    """The next move."""
    config = case.config
    move = fill(view, "user", config["user"]) or fill(view, "word", config["word"])
    if move:
        return move
    if view.state["remember"] != config["ask_remember"]:
        return click(view, "remember")
    wanted = config["role"] if config["ask_role"] else config["roles"][0]
    return pick(view, "role", wanted) or click(view, "submit")
