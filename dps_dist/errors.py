"""What a user did wrong, said in one sentence; the command line prints it and exits with 2."""


class InputError(ValueError):
    """Names the field or file, the value received and the remedy. Never a bug of ours."""
