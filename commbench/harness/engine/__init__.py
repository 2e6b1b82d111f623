"""The live driver: ranks that stay up and do what a session asks of them."""
