import os

# Some virtual machines announce AMX instructions and then refuse them, which ends the process at the first bfloat16
# product; oneDNN reads this before its first use.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
