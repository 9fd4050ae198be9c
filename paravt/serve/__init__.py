"""Local web servers: the ask page, and reports that follow a run. Needs the extra `serve`."""
