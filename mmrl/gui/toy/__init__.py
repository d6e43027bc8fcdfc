"""Generated pages and tasks, icons and the demo."""
