"""A sweep's files and the figures of its trials, for `launch`, which writes, and `report`."""

SWEEP, TRIALS, RUNS = "sweep.yaml", "trials.json", "runs"
SEED = "train.seed"
BETTER = {"accuracy": "max", "ece": "min", "nll": "min"}  # the figures, and which is the better
