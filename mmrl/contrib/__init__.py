"""Methods from single papers: they train, repeat and resume, and match one golden file; nothing more is tested."""
