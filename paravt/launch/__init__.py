"""Starting a run in several processes."""
