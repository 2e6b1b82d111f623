"""What a run's numbers belong to: machine, software, settings; and what can be measured here at all."""
