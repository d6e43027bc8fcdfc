"""Objectives against the published packages of other trainers, not a part of the tests: `make test-peers`."""
