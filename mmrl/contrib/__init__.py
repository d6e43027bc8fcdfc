"""Methods of single papers: they train, repeat and resume, and agree with one golden file; no more is promised."""
