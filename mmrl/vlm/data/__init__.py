"""Questions, prompts and chat turns, and the images and videos that belong to them."""
