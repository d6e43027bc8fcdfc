"""Episodes of robot policies: tasks, collecting, demonstrations and evaluation."""
