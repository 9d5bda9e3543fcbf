"""What starts and watches runs: Ray Train, telemetry, the machine's fitness."""
