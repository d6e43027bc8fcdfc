"""Training of the world model: recipes, evaluation and clips."""
