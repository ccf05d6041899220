"""What rules for the kept set cost in loss: `lrmoe ablate`."""
