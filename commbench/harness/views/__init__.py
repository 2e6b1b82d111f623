"""What is seen of a run beside its numbers: traces and profiles."""
