"""What fits on which machine: `lrmoe plan`."""
