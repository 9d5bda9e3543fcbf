"""Training and what comes of it: the loop, checkpoints, trained models, evaluation, export."""
