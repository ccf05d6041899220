"""Adapters to the training stacks people already use. Importing one changes nothing; calling it does."""
