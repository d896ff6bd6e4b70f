"""The programs for GPUs are compiled only where the `aot` extra is installed: `make test-aot`."""

from benchmarks.aot import compiler

collect_ignore = ["test_gpu_programs.py", "test_zero1.py"] if compiler.missing() else []


def pytest_report_header():
    if collect_ignore:
        files = " and ".join(f"tests/aot/{name}" for name in collect_ignore)
        return f"{files} need the `aot` extra ({compiler.missing()} not found): make test-aot"
    return None
