"""Training: the optimizer and its schedule, and the loop that steps them."""
