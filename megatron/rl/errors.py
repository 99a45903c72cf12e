# SPDX-License-Identifier: Apache-2.0
"""The error that is the user's to mend."""


class UserError(ValueError):
    """A setting, a file or a layout that cannot work; says what to change.

    The command line prints its message as one line and exits with code 2.
    """
