"""What a run leaves on disk: schema, run directory, raw samples. No torch."""
