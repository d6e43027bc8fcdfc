"""TSPO: a small agent that picks the frames of a long video for a video model, trained from rewards."""
