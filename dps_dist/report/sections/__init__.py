"""One section of the page a file: runs → HTML; empty where no run has what it shows."""
