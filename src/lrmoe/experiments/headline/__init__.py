"""Time to the same loss from trajectories and the stage: `make headline`."""
