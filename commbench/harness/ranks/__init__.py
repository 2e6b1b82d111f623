"""What runs in every rank of a launch."""
