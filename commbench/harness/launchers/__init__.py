"""Who starts the ranks, with which command, environment and placement."""
