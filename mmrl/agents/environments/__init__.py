"""Environments and their actions, tasks and experts, here or in worker processes."""
