"""Model folders: configuration, layout of positions, vision features and storage."""
