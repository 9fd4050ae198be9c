"""Pictures of runs, and pages made of templates."""

from paravt.report.curves import plot_run

__all__ = ["plot_run"]
