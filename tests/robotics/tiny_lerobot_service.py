"""`robotics.policies.lerobot.service` with a tiny pi0 and pi0.5; run by path in the interpreter of lerobot."""

import runpy
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from tests.robotics.lerobot_flows import shrink_pi  # noqa: E402

shrink_pi()
service = runpy.run_path(str(PROJECT / "robotics/policies/lerobot/service.py"))
make, make_flow = service["make"], service["make_flow"]
