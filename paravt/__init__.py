"""Agentic long-video understanding: parallel crops, one set of weights."""
