"""The base of every error whose message is written for the user, not for a debugger."""

from __future__ import annotations


class UserError(Exception):
    """What was asked for cannot be done, and the message says why and what to change.

    The command line prints it without a traceback and exits with 1.
    """
