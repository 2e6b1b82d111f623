"""Plays Gaudi's package: importing it makes torch know ``hpu``, whose module here has no events."""
