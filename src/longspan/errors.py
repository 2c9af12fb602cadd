"""The ways a verb ends early that are not a defect of ours."""


class UserError(ValueError):
    """The user's input is wrong. The message says what was expected, what came, what to change."""


class Stopped(Exception):
    """The run was asked to stop and has saved a checkpoint."""


class Diverged(Exception):
    """The loss is no longer a number."""
