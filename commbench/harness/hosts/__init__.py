"""Several hosts, each with a command of its own."""
