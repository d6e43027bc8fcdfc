"""KTO by TRL: pairs, and answers of which more are desirable than not.

python -m tests.golden.make.kto
"""

from tests.golden.make.pairs import PAIRS, pairs, trl_unpaired
from tests.golden.make.peers import numbers, write


def main() -> None:
    low = pairs() | {"logp_other": numbers(24, 2 * PAIRS, low=-9.0, high=-1.0)}
    inputs = low | {"ref_other": numbers(25, 2 * PAIRS, low=-12.0, high=-4.0)}
    paired, unpaired = [True] * PAIRS + [False] * PAIRS, [True, True, False, True, True, False, False, True]
    peers = [trl_unpaired(inputs, paired, 0.1, 1.0, 1.0) | {"options": {}}]
    changed = {"beta": 0.3, "desirable": 1.5, "undesirable": 0.5}
    peers += [trl_unpaired(inputs, unpaired, *changed.values()) | {"options": changed}]
    write("kto", "KTO, arXiv 2402.01306", inputs, peers)


if __name__ == "__main__":
    main()
