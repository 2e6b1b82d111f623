"""Watching a job from outside: where its ranks are, which of them stopped, and how it is ended."""
