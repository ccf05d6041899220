"""The systems that are compared: what each is, is given, stores and moves."""
