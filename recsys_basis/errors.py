"""Errors whose message is written for the user, not for a debugger, and the one that several parts raise."""

from __future__ import annotations


class UserError(Exception):
    """What was asked for cannot be done, and the message says why and what to change.

    The command line prints it without a traceback and exits with 1.
    """


class NonFiniteError(UserError, FloatingPointError):
    """A value of training is NaN or infinite, or a gradient is too large to square.

    Raised before the module that found it changes anything.
    """
