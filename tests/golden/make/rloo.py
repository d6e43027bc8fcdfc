"""RLOO: verl's divergence and advantages, TRL's loss on the ratio of a whole answer."""

from tests.golden.make.peers import write
from tests.golden.make.tokens import Trl, Verl, batch


def main() -> None:
    inputs = batch()
    verl = Verl(inputs)
    advantage = verl.advantage("compute_rloo_outcome_advantage", kl_ratio=0.05)
    trl = Trl(inputs).rloo(advantage[:, 0])
    calls = [f"verl.trainer.ppo.core_algos.{name}" for name in verl.calls]
    verl_answer = {"program": verl.program_of(), "calls": calls, "relative": 1e-12, "advantage": advantage}
    write("rloo", "RLOO, arXiv 2402.14740", inputs, [verl_answer, trl])


if __name__ == "__main__":
    main()
