"""Evaluation: the figures of a classifier, kept as sums that ranks can add."""
