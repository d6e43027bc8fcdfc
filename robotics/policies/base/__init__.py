"""The common parts of robot policies: interface, encoders, action tokens, statistics."""
