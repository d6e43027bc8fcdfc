"""REINFORCE++ by verl with untrained tool output between the tokens of a response."""

from types import SimpleNamespace

from tests.golden.make.peers import write
from tests.golden.make.tokens import COUNT_EPS, Verl, batch

GAMMA = 0.9


def main() -> None:
    inputs = batch() | {"gamma": GAMMA}
    inputs["mask"] = [_with_tool_output(row) for row in inputs["mask"]]
    verl = Verl(inputs)
    name, config = "compute_reinforce_plus_plus_outcome_advantage", SimpleNamespace(gamma=GAMMA)
    advantage = verl.advantage(name, config=config)
    peer = COUNT_EPS | {"program": verl.program_of(), "calls": [f"verl.trainer.ppo.core_algos.{x}" for x in verl.calls]}
    write("tool_output", "REINFORCE++, arXiv 2501.03262", inputs, [peer | {"advantage": advantage}])


def _with_tool_output(row: list[float]) -> list[float]:
    """The second and the third of more than three tokens are not trained."""
    return [0.0 if place in (1, 2) and sum(row) > 3 else value for place, value in enumerate(row)]


if __name__ == "__main__":
    main()
