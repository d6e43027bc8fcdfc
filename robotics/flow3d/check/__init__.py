"""The check of a plan: a picture of its outcome, and verifiers that judge it."""
