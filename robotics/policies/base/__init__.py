"""What all robot policies share: the policy interface, encoders, action tokens, statistics."""
