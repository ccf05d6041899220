"""Systems trained side by side to the same loss: `lrmoe compare`."""
