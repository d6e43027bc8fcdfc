"""Large libraries that programs of tests import; `programs.py` forks them from a process that has loaded this file."""

import contextlib

from mmrl.hub.compat import ensure_torchvision

ensure_torchvision()

import accelerate  # noqa: E402, F401
import peft  # noqa: E402, F401
import torch  # noqa: E402
import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl  # noqa: E402, F401

with contextlib.suppress(ImportError):
    from diffusers import StableDiffusion3Pipeline  # noqa: F401

from tests.charts import draw_no_charts  # noqa: E402

torch.set_num_threads(1)
draw_no_charts()  # those of the two steps of a test take as long as its start
