"""The programs for GPUs are compiled only where the `aot` extra is installed: `make test-aot`."""

from benchmarks.aot import compiler

collect_ignore = ["test_gpu_programs.py", "test_reports.py", "test_zero1.py"] if compiler.missing() else []


def pytest_report_header():
    if collect_ignore:
        return f"tests/aot needs the `aot` extra ({compiler.missing()} not found): make test-aot"
    return None
