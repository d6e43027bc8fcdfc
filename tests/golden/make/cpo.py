"""CPO by TRL.

python -m tests.golden.make.cpo
"""

from tests.golden.make.pairs import pairs, trl_without_reference
from tests.golden.make.peers import write


def main() -> None:
    from trl.experimental.cpo import CPOTrainer

    inputs = pairs()
    peer = trl_without_reference(inputs, CPOTrainer, loss_type="sigmoid", beta=0.1, cpo_alpha=1.0)
    write("cpo", "CPO, arXiv 2401.08417", inputs, [peer | {"options": {}}])


if __name__ == "__main__":
    main()
