"""Training runs that are recorded to be asked later, and the regimes they train in."""
