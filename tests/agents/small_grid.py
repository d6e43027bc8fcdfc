"""A grid of two moves, in a file of its own: a worker that starts imports nothing heavy."""


def small_grid(**options):
    """Make the grid, whatever the configuration asks for."""
    from mmrl.agents.toy.grid import GridWorld

    return GridWorld(size=3, max_steps=2)
