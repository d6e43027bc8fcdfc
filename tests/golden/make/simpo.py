"""SimPO by TRL.

python -m tests.golden.make.simpo
"""

from tests.golden.make.pairs import pairs, trl_without_reference
from tests.golden.make.peers import write


def main() -> None:
    from trl.experimental.cpo import CPOTrainer

    inputs = pairs()
    peer = trl_without_reference(inputs, CPOTrainer, loss_type="simpo", beta=2.0, simpo_gamma=1.0, cpo_alpha=0.0)
    write("simpo", "SimPO, arXiv 2405.14734", inputs, [peer | {"options": {}}])


if __name__ == "__main__":
    main()
