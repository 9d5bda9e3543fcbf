"""Deep Probabilistic Supervision at scale."""
