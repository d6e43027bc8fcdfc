"""Solvers, transition kernels and trajectories."""
