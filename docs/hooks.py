"""What the pages take from the rest of the repository when they are built: figures of benchmarks/results."""
