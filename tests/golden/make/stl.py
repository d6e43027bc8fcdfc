"""Robustness of signal temporal logic by rtamt (discrete time, offline)."""

from typing import Any

import rtamt

from tests.golden.make.peers import Made, numbers, package

STEPS = 12
FORMULAS = (
    # ours, that of rtamt, and how many first control steps see the whole window
    ("x > 0.25", "x > 0.25", 12),
    ("not (x <= 0.25)", "not (x <= 0.25)", 12),
    ("x > 0 and y < 0.5 or z >= 0", "((x > 0) and (y < 0.5)) or (z >= 0)", 12),
    ("implies(x > 0, y > 0)", "(x > 0) -> (y > 0)", 12),
    ("always[0:3](x > -0.5)", "always[0:3](x > -0.5)", 12),
    ("eventually[2:5](y > 0.1)", "eventually[2:5](y > 0.1)", 7),
    ("until[0:4](x > -0.6, z > 0.2)", "(x > -0.6) until[0:4] (z > 0.2)", 8),
    ("until[2:5](x > -0.6, z > 0.2)", "(x > -0.6) until[2:5] (z > 0.2)", 7),
    ("always[1:4](eventually[0:2](x + y > 0))", "always[1:4](eventually[0:2](x + y > 0))", 6),
    ("eventually[0:3](x > 0 and always[1:2](z < 0.7))", "eventually[0:3]((x > 0) and always[1:2](z < 0.7))", 7),
    ("not eventually[0:4](abs(x - z) > 1)", "not eventually[0:4](abs(x - z) > 1)", 8),
    ("2 * x - y * 0.5 > z - 1", "((2 * x) - (y * 0.5)) > (z - 1)", 12),
)


def robustness(text: str, signals: dict[str, Any]) -> list[float]:
    """Robustness at each control step."""
    specification = rtamt.StlDiscreteTimeSpecification()
    for name in signals:
        specification.declare_var(name, "float")
    specification.spec = text
    specification.parse()
    return [float(value) for _, value in specification.evaluate({"time": list(range(STEPS)), **signals})]


def make() -> Made:
    signals = {name: numbers(40 + place, STEPS) for place, name in enumerate("xyz")}
    inputs = {**signals, "formulas": [ours for ours, _, _ in FORMULAS], "known": [known for *_, known in FORMULAS]}
    found = [robustness(theirs, signals)[:known] for _, theirs, known in FORMULAS]
    calls = ["rtamt.StlDiscreteTimeSpecification.evaluate"]
    peer = {"program": package("rtamt"), "calls": calls, "relative": 1e-12, "robustness": found}
    return "Signal temporal logic, Donze and Maler 2010; TGPO, arXiv 2510.00225", inputs, [peer]
