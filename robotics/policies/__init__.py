"""Robot policies, one file or folder each."""
