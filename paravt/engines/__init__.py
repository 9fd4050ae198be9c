"""Engines: whatever runs the model behind one protocol (`base.Engine`)."""
