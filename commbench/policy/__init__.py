"""Engine dispatch policies as data, and their evaluator. No torch."""
