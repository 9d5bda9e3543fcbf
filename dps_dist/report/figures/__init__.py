"""One kind of figure a file: what an evaluation found → a Drawing."""
