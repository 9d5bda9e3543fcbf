"""What starts and watches runs: Ray Train, telemetry, the machine's fitness."""

import os

# A token that is given is meant to be shown. Ray looks once, when it is imported.
if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
    os.environ.setdefault("RAY_AUTH_MODE", "token")
