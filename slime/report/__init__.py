"""The report of a run: ``python -m slime.report RUN_DIR`` turns a run directory into one self-contained HTML page."""

from slime.report.page import write_report

__all__ = ["write_report"]
