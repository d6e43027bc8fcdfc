"""The two errors a user meets: a mistake in what was asked (exit 2) and a run that failed (exit 1)."""

__all__ = ["ConfigError", "RunError", "UserError"]


class UserError(Exception):
    """A mistake in a command, configuration or input; the message names the culprit and what is allowed."""


class ConfigError(UserError, ValueError):
    """A value of a configuration that is outside its declared bounds."""


class RunError(Exception):
    """A run that could not go on; the message names the cause and where the evidence was saved."""
