"""Pictures of runs."""

from paravt.report.curves import plot_run

__all__ = ["plot_run"]
