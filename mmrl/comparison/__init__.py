"""Experiments: arms on shared seeds, sweeps, paired differences."""
