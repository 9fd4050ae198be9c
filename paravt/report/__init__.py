"""Pictures and pages of runs: curves, reports from templates, and the viewer in one file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paravt.report.curves import plot_run

if TYPE_CHECKING:
    from paravt.report.write import write_report

__all__ = ["plot_run", "write_report"]


def __getattr__(name: str) -> Any:
    if name == "write_report":  # it reads what modules write that draw their pictures with this package
        from paravt.report.write import write_report

        return write_report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
