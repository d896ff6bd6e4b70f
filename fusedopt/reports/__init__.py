"""What an optimizer does with a model, on one page. rich and matplotlib make it nicer and are not needed to import it."""

from fusedopt.reports.report import Report as Report
from fusedopt.reports.report import report as report
